"""Staging: copies a shard into a slot of the arena while training goes on.

Invariants
  STAGING-1  Before save() returns, each tensor that may change outside `optimizer.step()` is copied (on the host) or cloned in
      stream order (on a device). If a device has no room for a clone, save() waits for the tensor's copy.
  STAGING-2  A tensor that only `optimizer.step()` changes is copied in the background, and no step begins before the copy has
      read it. On the host, the step's pre-hook copies the rest. On a device, the compute stream waits for the copy's event.
  STAGING-3  A snapshot is torn if a source changed before it was copied: torch's version counters show it, or the sample that
      save() took on the host (`torn_check.py`), or the sums that it queued on a device (`block_sums.py`). A torn snapshot is
      thrown away with a StagingError.
  STAGING-4  Once the stager's thread has a snapshot, `done` resolves, and nothing is copied into the slot after that.
  STAGING-5  A background copy that rests (`max_overhead`) holds no task, and a step that waits takes all tasks that are left at
      once. So no step waits for a rest.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch

from checkpointd.commands import command
from checkpointd.errors import StagingError
from checkpointd.pipeline.pace import Pace
from checkpointd.waits import Waiting
from checkpointd_client import devices
from checkpointd_client.capture.dtypes import can_be_copied_together, copy_bits
from checkpointd_client.capture.leaves import Leaves, note_outer, outer_of, version_of
from checkpointd_client.capture.state import Captured
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.block_sums import add_up
from checkpointd_client.staging.copies import Copies, addresses_of, bytes_of, storages_of
from checkpointd_client.staging.device_plan import DevicePlan, plan_device, taking
from checkpointd_client.staging.device_snapshot import DeviceSnapshot, leaf_at
from checkpointd_client.staging.places import Remembered, entire, sampled
from checkpointd_client.staging.slot_layout import Part, SlotLayout
from checkpointd_client.staging.torn_check import Proof, Sample

log = logging.getLogger("checkpointd")

StagingMode = Literal["lazy", "eager"]

STUCK_S = 120.0
"""A task takes milliseconds. If one takes longer than this, the thread that began it is gone."""
TASK_BYTES = 16 << 20
"""The background copy is cut into tasks of about this size, which a waiting trainer can take over."""

AT_ONCE_BYTES = 4 << 10
"""save() copies tensors of up to this size itself."""

_VERSION = attrgetter("_version")


@dataclass(frozen=True, slots=True, eq=False)
class Some:
    """Some of the leaves. `of` takes theirs out of a list for all leaves; `parts` are their places in the slot."""

    of: Callable[[Sequence[Any]], Sequence[Any]]
    parts: list[Part]
    offsets: list[int]
    fqns: list[str]


@dataclass(frozen=True, slots=True, eq=False)
class StagingPlan:
    """How one arrangement of a state is copied into a slot of one layout. Positions are those of the leaves."""

    layout: SlotLayout
    fqns: list[str]
    offsets: list[int]
    now: Some
    """The tensors on the host that save() copies itself. Those at the beginning of `together` are copied in one call."""
    together: int
    small: Some
    """The small tensors on the host that only optimizer steps change. save() copies them itself, by their addresses, since a
    sample of them and all that a later copy needs would take longer."""
    lazy: Some
    """The tensors on the host that are copied in the background, contiguous ones first."""
    contiguous: int
    """How many of these are contiguous: they are copied as bytes."""
    tasks: list[slice]
    """The background copies that belong together: either all of them are contiguous or none."""
    task_bytes: list[int]
    """The bytes of each task."""
    are_counted: bool
    """Whether the counters of the background tensors show all changes. torch counts no changes of an inference tensor, and
    counts those that are made through a composite tensor only there.
    """
    devices: tuple[DevicePlan, ...]
    is_whole: bool
    """Whether each device had memory for the whole plan."""


def _torn(fqn: str) -> StagingError:
    return StagingError(
        f"{fqn} was changed while its snapshot was taken, outside an optimizer step; the snapshot was thrown away. "
        "Call ckpt.fence() before you change parameters by hand, or set staging='eager': save() then copies all first"
    )


@dataclass
class Staging:
    """One snapshot being taken. `done` resolves when the slot holds all of it, or with the StagingError that spoiled it."""

    slot: Slot
    pace: Pace = field(default_factory=Pace)
    """How fast the background copy may go."""
    done: Future[None] = field(default_factory=Future)
    fence_s: float = 0.0
    """Seconds that optimizer steps waited for this snapshot."""
    _finisher: int | None = None
    """The thread that finishes the snapshot, so that `done` will resolve."""
    _fencing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a step waits."""
    _plan: StagingPlan | None = None
    _devices: list[DeviceSnapshot] = field(default_factory=list)
    _tasks: deque[Copies] = field(default_factory=deque)
    _proofs: list[tuple[Proof, Sequence[str]]] = field(default_factory=list)
    """Each proof with the FQNs of its tensors, in the order of its positions."""
    _unfenced: bool = True
    _left: int = 0
    _host_copied: threading.Event = field(default_factory=threading.Event)
    _hurried: threading.Event = field(default_factory=threading.Event)
    """Set when a step waits, which ends the rest of the background copy."""
    _spoiled: StagingError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fence(self) -> None:
        """Return when the sources may change. On the host, this copies the rest. On a device, it waits until the copies are
        queued, and the current stream waits for them.
        """
        self._check_device_sources()
        if not self._devices and self._left == 0:
            return
        began = time.perf_counter()
        with self._fencing:
            try:
                for part in self._devices:
                    part.fence()
                if self._left:
                    self._hurried.set()
                    self.help()
                    self._copying().until(self._host_copied.wait)
            finally:
                self.fence_s += time.perf_counter() - began

    @property
    def device(self) -> torch.device | None:
        """A device that some of the snapshot is copied from; None if all of it is in host memory."""
        return self._devices[0].device if self._devices else None

    def _copying(self) -> Waiting:
        return Waiting(lambda: "another thread has not ended a copy into the snapshot that it had begun")

    def help(self) -> None:
        """Copy tasks until none is left to take."""
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            self._run(task)

    def _copy_gently(self) -> None:
        """The same, with rests as the pace says, unless a step waits."""
        began, sizes = time.monotonic(), self._plan.task_bytes if self._plan is not None else []
        while not self._hurried.is_set():
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            started = time.monotonic()
            self._run(task)
            left = sum(sizes[len(sizes) - len(self._tasks) :])
            if not left or self.pace.share >= 1.0:
                continue
            now = time.monotonic()
            seconds = self.pace.copy_rest_after(now - started, (now - began) * left / max(1, sum(sizes) - left))
            if seconds:
                self._hurried.wait(seconds)
                self.pace.copy_rested_s += time.monotonic() - now
        self.help()

    def _run(self, task: Copies) -> None:
        spoiled: StagingError | None = StagingError(f"the copy of {task.fqns[0]} and others was interrupted")
        try:
            with torch.no_grad():
                task.run()
            fqn = task.changed()
            spoiled = None if fqn is None else _torn(fqn)
        except Exception as error:  # any error of torch spoils the snapshot, and training goes on
            spoiled = StagingError(f"the snapshot of {task.fqns[0]} and others failed: {error}")
            spoiled.__cause__ = error
        finally:  # also after Ctrl-C: nobody takes this task again
            with self._lock:
                self._spoiled = self._spoiled or spoiled
                self._left -= 1
                if self._left == 0:
                    self._host_copied.set()

    def _check_device_sources(self) -> None:
        """Before the first step, and only then, check whether torch counted changes of the sources on a device (STAGING-3).

        The step's own changes come after this check. On the device they come after the copy, since the stream waits for it.
        """
        with self._lock:
            if not self._unfenced:
                return
            self._unfenced = False
            for part in self._devices:
                position = part.changed()
                if position is not None and self._plan is not None:
                    self._spoiled = self._spoiled or _torn(self._plan.fqns[position])

    def finish(self) -> None:
        """Queue what is not queued, copy the rest, wait for the devices, then resolve `done`. Only the first call does this."""
        if self._claimed():
            self._finish()

    def _claimed(self) -> bool:
        """Whether this is the first thread that wants to finish the snapshot."""
        with self._lock:
            if self._finisher is None:
                self._finisher = threading.get_ident()
                return True
            return False

    def give_up(self) -> None:
        """End the snapshot of a save() that was interrupted. `done` resolves, at once unless the stager's thread has begun."""
        if self._claimed():
            self._spoiled = StagingError("save() was interrupted")
            for part in self._devices:
                part.abandon()
            if self._left == 0:
                self._host_copied.set()
            self._finish()
        elif self._finisher == threading.get_ident() and not self.done.done():
            self.done.set_exception(StagingError("the end of the snapshot was interrupted"))

    def _finish(self) -> None:
        try:
            self._copy_everything()
        except BaseException as error:
            self._spoiled = self._spoiled or StagingError(f"the snapshot was not finished: {error!r}")
            for part in self._devices:
                part.abandon()
            if not isinstance(error, Exception):  # otherwise the stager's thread goes on to the next snapshot
                raise
        finally:
            with self._lock:
                self._unfenced = False
            for part in self._devices:
                part.free()
            self._proofs.clear()
            self._plan = None
            if self._spoiled:
                self.done.set_exception(self._spoiled)
            else:
                self.slot.complete()
                self.done.set_result(None)

    def _copy_everything(self) -> None:
        if self._plan is not None and self._spoiled is None:
            self.slot.populate(self._plan.layout.nbytes)  # a step that waits meanwhile copies without this
        for part in self._devices:
            part.queue()
        self._copy_gently()
        if self._copying().until(self._host_copied.wait, STUCK_S):
            with self._fencing:  # wait for a step that waited for the copy: `fence_s` must be final when `done` resolves
                pass
        else:
            self._spoiled = self._spoiled or StagingError("a copy that another thread had begun never ended")
        for part in self._devices:
            error = part.synchronize()
            self._spoiled = self._spoiled or error
        self._check_device_sources()
        self._spoiled = self._spoiled or self._unproved()

    def _unproved(self) -> StagingError | None:
        """The error if the full slot differs from the sources at save(), or if that cannot be checked."""
        try:
            for proof, fqns in self._proofs:
                position = proof.torn()
                if position is not None:
                    return _torn(fqns[position])
            for part in self._devices:
                place = part.differs()
                if place is not None and self._plan is not None:
                    return _differs(self._plan, place, part.device)
        except Exception as error:  # such as a MemoryError: an unproved snapshot is not persisted
            return StagingError(f"the snapshot could not be compared with what save() saw: {error!r}")
        return None


def _differs(plan: StagingPlan, place: tuple[int, int], device: torch.device) -> StagingError:
    """The error if the bytes at `place` in the slot, (offset, bytes), are not those that the device had at save()."""
    offset, nbytes = place
    first, last = leaf_at(offset, plan.offsets), leaf_at(offset + nbytes - 1, plan.offsets)
    if first == last:
        start = offset - plan.offsets[first]
        where = f"{plan.fqns[first]} (its bytes {start} to {start + nbytes - 1})"
    else:
        where = f"one of the {last - first + 1} tensors from {plan.fqns[first]} to {plan.fqns[last]}"
    return StagingError(
        f"{where} differs from what it was on {device} at save(); the snapshot was thrown away. Either it was changed in a way "
        "that torch does not count, as through .data, by a custom kernel or by the replay of a graph: call ckpt.fence() before "
        "such a change, or set staging='eager'. Or the copy from the device went wrong: "
        f"{command('doctor', '--device')} tests such copies"
    )


class Stager:
    """Takes snapshots; its thread copies in the background. `device_checksums`: whether sums prove the copies from devices."""

    def __init__(self, mode: StagingMode, *, device_checksums: bool = True) -> None:
        self.mode = mode
        self._checksums = device_checksums
        self._queue: deque[Staging] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._streams: dict[torch.device, torch.Stream] = {}
        self._sums: dict[torch.device, bool] = {}
        self._lasts: dict[torch.device, DeviceSnapshot] = {}
        self._arrangement: object = None
        self._plan: StagingPlan | None = None
        self._reuses = 0
        """How many saves in a row had the arrangement of the one before."""
        self._samples, self._smalls, self._flat = Remembered(sampled), Remembered(entire), Remembered(bytes_of)
        self._thread = threading.Thread(target=self._work, name="checkpointd-stager", daemon=True)
        self._thread.start()

    def begin(self, staging: Staging, captured: Captured, layout: SlotLayout) -> None:
        """Start the snapshot. When this returns, every tensor that may change outside a step is safe (STAGING-1).

        If it raises, call `staging.give_up()`, and keep the slot until `staging.done` has resolved.
        """
        staging.slot.begin()
        if self.mode == "eager":
            staging.slot.populate(layout.nbytes)
        with torch.inference_mode(False):  # the memory that is kept for the next save must not depend on the mode of this one
            self._save(staging, captured, layout)
        if self.mode == "eager" or not (staging._devices or staging._left):
            staging.finish()
        else:
            self._hand_over(staging)

    def _save(self, staging: Staging, captured: Captured, layout: SlotLayout) -> None:
        plan = staging._plan = self._plan_of(captured, layout)
        if plan.devices:
            tensors = list(map(torch.Tensor.detach, captured.leaves.tensors))
            if any(one.have_outer for one in plan.devices):
                for tensor, leaf in zip(tensors, captured.leaves.tensors, strict=True):
                    if (outer := outer_of(leaf)) is not None:
                        note_outer(tensor, outer)
            targets = staging.slot.views(layout.parts)
            for device_plan in plan.devices:
                self._save_device(staging, device_plan, tensors, targets)
        self._save_host(staging, plan, captured.leaves)

    def _save_device(
        self, staging: Staging, plan: DevicePlan, tensors: list[torch.Tensor], targets: list[torch.Tensor]
    ) -> None:
        part = DeviceSnapshot(plan, self._side(plan.device), staging.slot, targets)
        staging._devices.append(part)
        part.save(tensors, self._lasts.get(plan.device))
        self._lasts[plan.device] = part
        part.wait_for_urgent()

    def _save_host(self, staging: Staging, plan: StagingPlan, leaves: Leaves) -> None:
        """Copy what may change, and prepare the background copies."""
        tensors, slot = leaves.tensors, staging.slot
        if plan.small.parts:
            for points in self._smalls.of(plan.small.of(tensors), plan.small.offsets, (leaves.columns, plan)):
                points.copy(slot.buffer)
        sources, targets = plan.now.of(tensors), slot.views(plan.now.parts)
        with torch.no_grad():
            if plan.together:  # no Python code runs for a single one of these
                torch._foreach_copy_(targets[: plan.together], list(sources[: plan.together]))
            for target, source in zip(targets[plan.together :], sources[plan.together :], strict=True):
                copy_bits(target, source)
        if plan.lazy.parts:
            self._prepare_lazy(staging, plan, leaves)
        staging._left = len(staging._tasks)
        if staging._left == 0:
            staging._host_copied.set()

    def _prepare_lazy(self, staging: Staging, plan: StagingPlan, leaves: Leaves) -> None:
        """Prepare the background copies. No Python code runs for a single contiguous tensor."""
        lazy, count, key = plan.lazy, plan.contiguous, (leaves.columns, plan)
        tensors, targets = lazy.of(leaves.tensors), staging.slot.views(lazy.parts)
        storages, bent = storages_of(tensors[:count]), list(map(torch.Tensor.detach, tensors[count:]))
        version = _VERSION if plan.are_counted else version_of
        versions = list(map(version, tensors))
        sample = Sample.take(self._samples.of(tensors, lazy.offsets, key), staging.slot.buffer)
        staging._proofs.append((sample, lazy.fqns))
        sources, addresses = [*self._flat.of(tensors[:count], lazy.offsets, key), *bent], addresses_of(storages)
        for some in plan.tasks:
            held = storages[some], addresses[some]
            staging._tasks.append(
                Copies(lazy.fqns[some], tensors[some], version, versions[some], sources[some], targets[some], held)
            )

    def _plan_of(self, captured: Captured, layout: SlotLayout) -> StagingPlan:
        """The plan of the last save if the state is arranged as it was, else a new one."""
        known = self._plan
        if known is not None and known.layout is layout and self._arrangement is captured.arrangement:
            self._reuses += 1
            # While a device is full, a new plan is tried less and less often, since each try makes its allocator search.
            if known.is_whole or self._reuses & (self._reuses - 1):
                return known
        else:
            self._reuses = 0
        self._plan = known = None  # this frees the old scratch memory before the new plan allocates its own
        self._plan, self._arrangement = self._new_plan(captured.leaves, layout), captured.arrangement
        return self._plan

    def _new_plan(self, of: Leaves, layout: SlotLayout) -> StagingPlan:
        leaves, parts = tuple(of), layout.parts

        def some(positions: list[int], as_bytes: int = 0) -> Some:
            typed = [parts[i] for i in positions[as_bytes:]]
            plain = [(parts[i][0], parts[i][1], torch.uint8, (parts[i][1],)) for i in positions[:as_bytes]]
            return Some(
                taking(positions), [*plain, *typed], [parts[i][0] for i in positions], [leaves[i].fqn for i in positions]
            )

        filled = [i for i, leaf in enumerate(leaves) if leaf.tensor.numel()]
        where = {leaf.tensor.device: devices.has_streams(leaf.tensor.device) for leaf in leaves}
        host = [i for i in filled if not where[leaves[i].tensor.device]]
        flat = {i for i in host if leaves[i].tensor.is_contiguous()}
        small = [i for i in host if i in flat and leaves[i].optimizer_only and layout.parts[i][1] <= AT_ONCE_BYTES]
        quick = set(small)
        lazy = [i for i in host if leaves[i].optimizer_only and self.mode == "lazy" and i not in quick]
        lazy = sorted(lazy, key=lambda i: i not in flat)
        now = set(host).difference(small, lazy)
        together = [i for i in sorted(now) if can_be_copied_together(leaves[i].tensor)]
        contiguous = sum(i in flat for i in lazy)
        eager, plans, is_whole = self.mode == "eager", [], True
        for device in dict.fromkeys(leaves[i].tensor.device for i in filled):
            if where[device]:
                proves = self._proves(device)
                plans.append(plan_device(device, of, layout, still=eager, checksums=proves))
                is_whole = is_whole and plans[-1].is_whole and proves is not None
        sizes = [layout.parts[i][1] for i in lazy]
        tasks = _tasks_of(sizes, contiguous)
        return StagingPlan(
            layout,
            [leaf.fqn for leaf in leaves],
            [offset for offset, *_ in layout.parts],
            some([*together, *sorted(now.difference(together))]),
            len(together),
            some(small),
            some(lazy, as_bytes=contiguous),
            contiguous,
            tasks,
            [sum(sizes[one]) for one in tasks],
            not any(of.tensors[i].is_inference() or outer_of(of.tensors[i]) is not None for i in lazy),
            tuple(plans),
            is_whole,
        )

    def _side(self, device: torch.device) -> torch.Stream:
        return self._streams.setdefault(device, torch.Stream(device))

    def _proves(self, device: torch.device) -> bool | None:
        """Whether sums of `device` can prove copies from it; None if it has no memory left to find out."""
        if self._checksums and device not in self._sums:
            try:
                with devices.on_stream(self._side(device)):
                    self._sums[device] = add_up(device)
            except RuntimeError as error:
                if not devices.is_out_of_memory(error):
                    raise
                return None
            if not self._sums[device]:
                log.warning("%s does not add 64-bit integers exactly: snapshots from it are taken without checksums", device)
        return self._checksums and self._sums[device]

    def _hand_over(self, staging: Staging) -> None:
        with self._wake:
            self._queue.append(staging)
            self._wake.notify()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                staging = self._queue.popleft()
            if staging.device is not None:
                # A thread begins with device 0. A call there would start its driver, which takes memory of another rank.
                with suppress(RuntimeError):  # a device that fails shows when the copies are queued
                    torch.accelerator.set_device_index(staging.device)
            staging.finish()
            del staging  # it refers to memory

    def close(self, timeout: float) -> None:
        """End the thread when its queue is empty. Do not wait for more than `timeout` seconds: the thread may be stuck."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)


def _tasks_of(nbytes: Sequence[int], apart: int) -> list[slice]:
    """Cut copies of so many bytes each into tasks. A task begins at the position `apart`."""
    starts: list[int] = []
    filled = 0
    for i, size in enumerate(nbytes):
        if not starts or filled >= TASK_BYTES or i == apart:
            starts.append(i)
            filled = 0
        filled += size
    return [slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(nbytes)], strict=False)]
