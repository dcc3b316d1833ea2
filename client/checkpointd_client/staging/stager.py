"""Staging: copies a shard into a slot of the arena while training goes on.

Invariants
  STAGING-1  Before save() returns, each tensor that may change outside `optimizer.step()` is copied (on the host) or cloned in
      stream order (on a device). If a device tensor is too large to be cloned, save() waits for its copy.
  STAGING-2  A tensor that only `optimizer.step()` changes is copied in the background, and no step begins before the copy has
      read it. On the host, the step's pre-hook copies the rest. On a device, the compute stream waits for the copy's event.
  STAGING-3  A snapshot is torn if torch's version counters or, on the host, the sample that save() took (`torn_check.py`) show
      that a source changed before it was copied. A torn snapshot is thrown away with a StagingError.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import torch

from checkpointd.errors import StagingError
from checkpointd.layout.boxes import whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.pipeline.pages import page_up
from checkpointd.pipeline.shard import ShardTensor, aligned
from checkpointd.waits import Waiting
from checkpointd_client import devices
from checkpointd_client.capture.dtypes import bits, copy_bits
from checkpointd_client.capture.state import Captured, Leaf
from checkpointd_client.sharding.dtensor import LocalBox as HeldPart
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.torn_check import Proof, Sampler

StagingMode = Literal["lazy", "eager"]

STUCK_S = 120.0
"""A task takes milliseconds. If one takes longer than this, the thread that began it is gone."""
CLONED_BYTES_MAX = 512 << 20
"""The most device memory that one save uses for clones until they are copied. Training needs the rest."""
TASK_BYTES = 16 << 20
"""The background copy is cut into tasks of about this size, which a waiting trainer can take over."""

Part = tuple[int, int, torch.dtype, tuple[int, ...]]
Signature = tuple[tuple[str, str, tuple[int, ...], HeldPart | None], ...]


@dataclass(frozen=True, eq=False)
class SlotLayout:
    """The place of each tensor of a state in a slot; used again while the state keeps its `signature`."""

    signature: Signature
    tensors: tuple[ShardTensor, ...]
    parts: list[Part]
    nbytes: int


def signature_of(captured: Captured) -> Signature:
    """The FQN, dtype, shape and box of every leaf: a slot's layout depends on nothing else."""
    return tuple((leaf.fqn, leaf.dtype, tuple(leaf.tensor.shape), leaf.part) for leaf in captured.leaves)


def plan_slot(captured: Captured) -> SlotLayout:
    """Lay the tensors out one after the other, at multiples of 64 bytes; `nbytes` is a whole number of pages."""
    tensors: list[ShardTensor] = []
    parts: list[Part] = []
    offset = 0
    for leaf in captured.leaves:
        item, part = ITEM_BYTES[leaf.dtype], leaf.part
        shape = tuple(leaf.tensor.shape)
        nbytes = leaf.tensor.numel() * item
        if part is None:
            tensors.append(ShardTensor(leaf.fqn, leaf.dtype, shape, whole(shape), "rank", offset, nbytes, item))
        else:
            tensors.append(ShardTensor(leaf.fqn, leaf.dtype, part.shape, part.box, "global", offset, nbytes, item))
        parts.append((offset, nbytes, leaf.tensor.dtype, shape))
        offset += aligned(nbytes)
    return SlotLayout(signature_of(captured), tuple(tensors), parts, page_up(max(offset, 1)))


@dataclass(frozen=True, slots=True)
class Copy:
    """The copy of one tensor into the slot. `version` is the source's version counter at save(), or None if it has none."""

    fqn: str
    source: torch.Tensor
    target: torch.Tensor
    version: int | None

    def run(self) -> None:
        copy_bits(self.target, self.source)

    def changed(self) -> bool:
        return self.version is not None and self.source._version != self.version


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _torn(fqn: str) -> StagingError:
    return StagingError(
        f"{fqn} was changed while its snapshot was taken, outside an optimizer step; the snapshot was thrown away. "
        "Call ckpt.fence() before you change parameters by hand, or use Checkpointer(..., staging='eager')"
    )


def _changed_since_save(copies: list[Copy]) -> StagingError | None:
    """The error of the first copy whose source torch has counted a change of."""
    return next((_torn(copy.fqn) for copy in copies if copy.changed()), None)


@dataclass
class Staging:
    """One snapshot being taken. `done` resolves when the slot holds all of it, or with the StagingError that spoiled it."""

    slot: Slot
    done: Future[None] = field(default_factory=Future)
    fence_s: float = 0.0
    """Seconds that optimizer steps waited for this snapshot."""
    _fencing: threading.Lock = field(default_factory=threading.Lock)
    """Held while a step waits."""
    _tasks: deque[list[Copy]] = field(default_factory=deque)
    _events: list[tuple[torch.device, torch.Event]] = field(default_factory=list)
    _held: list[torch.Tensor] = field(default_factory=list)
    _device_copies: list[Copy] = field(default_factory=list)
    _proofs: list[tuple[Proof, list[Copy]]] = field(default_factory=list)
    """Each proof with its copies, in the order of its positions."""
    _unfenced: bool = True
    _left: int = 0
    _host_copied: threading.Event = field(default_factory=threading.Event)
    _spoiled: StagingError | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def fence(self) -> None:
        """Return when the sources may change. On the host, this copies the rest. On a device it returns at once, and the
        current stream waits.
        """
        self._check_device_sources()
        for device, event in self._events:
            torch.accelerator.current_stream(device).wait_event(event)
        if self._left == 0:
            return
        began = time.perf_counter()
        with self._fencing:
            try:
                self.help()
                self._copying().until(self._host_copied.wait)
            finally:
                self.fence_s += time.perf_counter() - began

    @property
    def device(self) -> torch.device | None:
        """A device that some of the snapshot is copied from; None if all of it is in host memory."""
        return self._events[0][0] if self._events else None

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

    def _run(self, task: list[Copy]) -> None:
        spoiled: StagingError | None = StagingError(f"the copy of {task[0].fqn} and others was interrupted")
        try:
            with torch.no_grad():
                for copy in task:
                    copy.run()
            spoiled = _changed_since_save(task)
        except Exception as error:  # any error of torch spoils the snapshot, and training goes on
            spoiled = StagingError(f"the snapshot of {task[0].fqn} and others failed: {error}")
            spoiled.__cause__ = error
        finally:  # also after Ctrl-C: nobody takes this task again
            with self._lock:
                self._spoiled = self._spoiled or spoiled
                self._left -= 1
                if self._left == 0:
                    self._host_copied.set()

    def _check_device_sources(self) -> None:
        """Before the first step, and only then, check whether the sources on a device were changed by hand (STAGING-3).

        The step's own changes come after this check. On the device they come after the copy, since the stream waits for it.
        """
        with self._lock:
            if not self._unfenced:
                return
            self._unfenced = False
            self._spoiled = self._spoiled or _changed_since_save(self._device_copies)

    def finish(self) -> None:
        """On the stager's thread: copy the rest, wait for the device, then resolve `done`."""
        self.help()
        if self._copying().until(self._host_copied.wait, STUCK_S):
            with self._fencing:  # wait for a step that waited for the copy: `fence_s` must be final when `done` resolves
                pass
        else:
            self._spoiled = self._spoiled or StagingError("a copy that another thread had begun never ended")
        for _, event in self._events:
            try:
                event.synchronize()
            except Exception as error:  # this is where any failed kernel on the device shows
                self._spoiled = self._spoiled or StagingError(f"the copy from the device failed: {devices.told(error)}")
                self.slot.still_written |= not devices.is_over(event)
        self._check_device_sources()
        self._spoiled = self._spoiled or self._unproved()
        self._held.clear()
        self._device_copies.clear()
        self._proofs.clear()
        if self._spoiled:
            self.done.set_exception(self._spoiled)
        else:
            self.slot.complete()
            self.done.set_result(None)

    def _unproved(self) -> StagingError | None:
        """The error if the full slot differs from the sources at save(), or if that cannot be checked."""
        try:
            for proof, copies in self._proofs:
                position = proof.torn()
                if position is not None:
                    return _torn(copies[position].fqn)
        except Exception as error:  # such as a MemoryError: an unproved snapshot is not persisted
            return StagingError(f"the snapshot could not be compared with what save() saw: {error!r}")
        return None


class Stager:
    """Takes snapshots; its thread copies in the background."""

    def __init__(self, mode: StagingMode) -> None:
        self.mode = mode
        self._queue: deque[Staging] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._streams: dict[torch.device, torch.Stream] = {}
        self._sampler = Sampler()
        self._thread = threading.Thread(target=self._work, name="checkpointd-stager", daemon=True)
        self._thread.start()

    def begin(self, captured: Captured, layout: SlotLayout, slot: Slot) -> Staging:
        """Start the snapshot. When this returns, every tensor that may change outside a step is safe (STAGING-1)."""
        slot.begin()
        staging = Staging(slot)
        targets = slot.views(layout, layout.parts)
        lazy: list[Copy] = []
        starts: list[int] = []
        offsets: list[int] = []
        now: list[Copy] = []
        device: dict[torch.device, list[tuple[Leaf, torch.Tensor]]] = {}
        for leaf, target, (offset, *_) in zip(captured.leaves, targets, layout.parts, strict=True):
            if leaf.tensor.numel() == 0:
                continue
            if devices.has_streams(leaf.tensor.device):
                device.setdefault(leaf.tensor.device, []).append((leaf, target))
            else:
                background = leaf.optimizer_only and self.mode == "lazy"
                copies = lazy if background else now
                copies.append(Copy(leaf.fqn, leaf.tensor, target, _version(leaf.tensor) if background else None))
                if background:
                    starts.append(leaf.start)
                    offsets.append(offset)
        try:
            for where, pairs in device.items():
                slot.pin(where.type)
                self._copy_from(where, pairs, staging)
            with torch.no_grad():
                for copy in now:
                    copy.run()
            if lazy:
                sample = self._sampler.take(layout, [copy.source for copy in lazy], starts, offsets, slot.buffer)
                staging._proofs.append((sample, lazy))
        except BaseException:
            self._end_copies(device, slot)
            raise
        staging._tasks.extend(_tasks_of(lazy))
        staging._left = len(staging._tasks)
        if staging._left == 0:
            staging._host_copied.set()
        if self.mode == "eager" or not (lazy or device):
            staging.finish()
        else:
            self._hand_over(staging)
        return staging

    def _copy_from(self, where: torch.device, pairs: list[tuple[Leaf, torch.Tensor]], staging: Staging) -> None:
        """Queue the copies on a side stream, behind the queued work of the current stream."""
        compute = torch.accelerator.current_stream(where)
        side = self._streams.setdefault(where, torch.Stream(where))
        still = self.mode == "eager"
        sources, waits = unchanging([(leaf.tensor, leaf.optimizer_only or still) for leaf, _ in pairs])
        # If these were freed before the copy is done, the allocator could give their memory to the current stream.
        staging._held.extend(sources)
        side.wait_stream(compute)
        with devices.on_stream(side), torch.no_grad():
            for source, (_, target) in zip(sources, pairs, strict=True):
                bits(target).copy_(bits(source), non_blocking=True)
            event = torch.Event(where)
            event.record(side)
        staging._events.append((where, event))
        if waits:
            event.synchronize()
        staging._device_copies += [
            Copy(leaf.fqn, leaf.tensor, target, _version(leaf.tensor))
            for leaf, target in pairs
            if leaf.optimizer_only and not still
        ]

    def _end_copies(self, where: Iterable[torch.device], slot: Slot) -> None:
        """Wait until no queued copy writes into `slot` any more. A slot of which that is not known is never used again."""
        for device in where:
            side = self._streams.get(device)
            if side is not None:
                with suppress(Exception):  # the error that ended the snapshot is raised
                    side.synchronize()
                slot.still_written |= not devices.is_over(side)

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
            staging.finish()

    def close(self, timeout: float) -> None:
        """End the thread when its queue is empty. Do not wait for more than `timeout` seconds: the thread may be stuck."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout)


def unchanging(tensors: list[tuple[torch.Tensor, bool]]) -> tuple[list[torch.Tensor], bool]:
    """For pairs of a tensor on a device and whether it is stable: the tensors to copy, and whether save() must wait for the
    copies.

    A tensor that is not stable is cloned. Clones take at most CLONED_BYTES_MAX, and no more than the device has left. If a
    tensor finds no room for a clone, it is copied itself, and save() must wait.
    """
    sources: list[torch.Tensor] = []
    left, waits = CLONED_BYTES_MAX, False
    for tensor, stable in tensors:
        source = tensor
        if not stable and tensor.nbytes <= left:
            try:
                source = tensor.detach().clone()
                left -= tensor.nbytes
            except RuntimeError as error:
                if not devices.is_out_of_memory(error):
                    raise
                left = -1
        waits = waits or (source is tensor and not stable)
        sources.append(source)
    return sources, waits


def _tasks_of(copies: list[Copy]) -> list[list[Copy]]:
    tasks: list[list[Copy]] = []
    filled = TASK_BYTES
    for copy in copies:
        if filled >= TASK_BYTES:
            tasks.append([])
            filled = 0
        tasks[-1].append(copy)
        filled += copy.target.nbytes
    return tasks
