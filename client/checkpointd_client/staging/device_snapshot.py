"""One device's part of a snapshot: work that save() queues on the compute stream, then copies on a side stream.

Invariants
  DEVICE-1  At save(), the compute stream gathers the small tensors into scratch memory, clones the large ones that may change
      outside a step, and sums the bytes of all tensors. Later work cannot change these copies and sums.
  DEVICE-2  The copies into the slot are queued by the stager's thread, or by whoever needs them first: a step, or the next
      save. They wait for the event that save() recorded.
  DEVICE-3  A step waits on the host until the copies are queued, and its stream waits for their event.
  DEVICE-4  The scratch memory is filled again only behind the copies that read it.
  DEVICE-5  After an error or an interruption, the slot is given back only when no queued copy writes into it (ARENA-5).
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch

from checkpointd.errors import StagingError
from checkpointd.waits import Waiting
from checkpointd_client import devices
from checkpointd_client.capture.dtypes import bits
from checkpointd_client.capture.leaves import version_of
from checkpointd_client.staging.arena import Slot
from checkpointd_client.staging.block_sums import sums_of_slot
from checkpointd_client.staging.device_plan import DevicePlan, taking

log = logging.getLogger("checkpointd")

CLONED_BYTES_MAX = 512 << 20
"""The most device memory that one save uses for clones until they are copied. Training needs the rest."""
_VERSION = attrgetter("_version")


class DeviceSnapshot:
    """The tensors of one device in one snapshot. Thread-safe after `save`. `targets`: the views of the slot, by leaf."""

    def __init__(self, plan: DevicePlan, side: torch.Stream, slot: Slot, targets: Sequence[torch.Tensor]) -> None:
        self.device = plan.device
        self._plan, self._side, self._slot, self._targets = plan, side, slot, targets
        self._sources: list[torch.Tensor] = []
        """The direct tensors or their clones. The allocator could give their memory away if they were freed before the copy."""
        self._urgent: list[bool] = []
        """For each tensor that may change: whether save() waits for its copy, because there was no room for a clone."""
        self._counted: Sequence[torch.Tensor] = ()
        self._version: Callable[[torch.Tensor], int | None] = _VERSION
        self._versions: list[int | None] = []
        self._sums: torch.Tensor | None = None
        self._saved: torch.Event | None = None
        self._safe: torch.Event | None = None
        self._gathered: torch.Event | None = None
        self._copied: torch.Event | None = None
        self._queued = False
        self._queueing = threading.Lock()
        self._tried = threading.Event()
        """Whether a thread has queued the copies or failed to."""
        self._error: StagingError | None = None

    # --- on the training thread, inside save() -------------------------------------------------------------------

    def save(self, tensors: Sequence[torch.Tensor], last: DeviceSnapshot | None) -> None:
        """Queue DEVICE-1 on the current stream. `tensors`: all leaves. `last`: the snapshot of this device before this one."""
        plan, compute = self._plan, torch.accelerator.current_stream(self.device)
        if last is not None:
            last.let_scratch_go(compute)
        with torch.no_grad():
            # No Python code runs for a single tensor here, except for large ones that are cloned or summed alone.
            self._counted = taking(plan.counted)(tensors)
            self._version = version_of if plan.have_outer else _VERSION
            self._versions = list(map(self._version, self._counted))
            clones, self._urgent = cloned(taking(plan.moving)(tensors))
            self._sources = [*clones, *taking(plan.stable)(tensors)]
            with self._without_sums_if_full():
                self._queue_sums(tensors)
            if plan.gathered is not None:
                plan.gathered.gather(tensors)
                with self._without_sums_if_full():
                    plan.gathered.add_up(self._sums)
        self._saved = torch.Event(self.device)
        self._saved.record(compute)

    def _queue_sums(self, tensors: Sequence[torch.Tensor]) -> None:
        plan = self._plan
        if not plan.sums:
            return
        self._sums = torch.empty(plan.sums, dtype=torch.int64, device=self.device)
        for batch in plan.batches:
            batch.gather(tensors)
            batch.add_up(self._sums)
        for k, row in plan.alone:
            row.queue(self._sources[k], self._sums)

    @contextmanager
    def _without_sums_if_full(self) -> Iterator[None]:
        """Go without the sums if the device has no memory for them, or for what adding up takes."""
        try:
            yield
        except RuntimeError as error:
            if not devices.is_out_of_memory(error):
                raise
            log.warning("%s has no memory for the checksums of a snapshot, which is taken without them", self.device)
            self._sums = None

    def wait_for_urgent(self) -> None:
        """Wait for the copies of tensors that may change outside a step and have no clone (STAGING-1).

        `synchronize` returns the error if they fail.
        """
        if any(self._urgent):
            self.queue()
            self._wait_for(self._safe)

    def abandon(self) -> None:
        """After an error in save(): queue nothing any more, and wait for the copies that are queued already (DEVICE-5)."""
        with self._queueing:
            if self._queued:
                self._end_copies()
            self._queued = True
            self._tried.set()

    # --- on any thread -------------------------------------------------------------------------------------------

    def queue(self) -> None:
        """Return when the copies are queued, by this thread or another one. `synchronize` returns the error if that fails."""
        if self._queueing.locked():
            Waiting(lambda: f"the copies from {self.device} are not queued yet").until(self._are_tried)
        with self._queueing:  # an interruption between an acquire() and a `try` would leave the lock held
            if self._queued or self._saved is None:
                return
            self._error = StagingError(f"the copy from {self.device} was interrupted")  # until it is done
            self._queued = True
            try:
                self._queue_copies(self._saved)
                self._error = None
            except Exception as error:  # any error of torch spoils the snapshot, and training goes on
                self._error = StagingError(f"the copy from {self.device} failed: {devices.told(error)}")
                self._error.__cause__ = error
            finally:
                if self._error is not None:
                    self._end_copies()
                self._tried.set()

    def _are_tried(self, seconds: float) -> bool:
        return self._tried.wait(seconds) or not self._queueing.locked()

    def _queue_copies(self, saved: torch.Event) -> None:
        side, memory = self._side, self._slot.memory
        with devices.on_stream(side), torch.no_grad():
            self._slot.pin(self.device.type)
            side.wait_event(saved)
            self._copy_direct(urgent=True)
            self._safe = self._recorded()
            if self._plan.gathered is not None:
                scratch = self._plan.gathered.memory
                for run in self._plan.runs:
                    source = scratch[run.scratch : run.scratch + run.nbytes]
                    memory[run.slot : run.slot + run.nbytes].copy_(source, non_blocking=True)
                self._gathered = self._recorded()
            self._copy_direct(urgent=False)
            self._copied = self._recorded()

    def _copy_direct(self, *, urgent: bool) -> None:
        are_urgent = [*self._urgent, *([False] * len(self._plan.stable))]
        for i, source, is_urgent in zip(self._plan.direct, self._sources, are_urgent, strict=True):
            if is_urgent is urgent:
                queue_copy(bits(self._targets[i]), bits(source))

    def _recorded(self) -> torch.Event:
        event = torch.Event(self.device)
        event.record(self._side)
        return event

    def _end_copies(self) -> None:
        """Wait until no queued copy writes into the slot any more. If that cannot be known, the slot is never used again."""
        try:
            self._side.synchronize()
        except Exception:  # the snapshot has the error that spoiled it already
            self._slot.still_written |= not devices.is_over(self._side)

    def fence(self) -> None:
        """Let the current stream wait for the copies (DEVICE-3)."""
        self.queue()
        if self._copied is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._copied)

    def let_scratch_go(self, compute: torch.Stream) -> None:
        """Let `compute` wait for everything that reads or fills the scratch memory (DEVICE-4)."""
        self.queue()
        last = self._gathered or self._saved  # if nothing was gathered to be copied, the sums of save() used it last
        if last is not None:
            compute.wait_event(last)

    def changed(self) -> int | None:
        """The position of the first leaf of which torch has counted a change since save(); None if there is none."""
        if list(map(self._version, self._counted)) == self._versions:
            return None
        versions = zip(self._plan.counted, self._counted, self._versions, strict=True)
        return next((i for i, tensor, version in versions if self._version(tensor) != version), None)

    # --- at the end ----------------------------------------------------------------------------------------------

    def synchronize(self) -> StagingError | None:
        """Wait until the copies are done; the error if they failed."""
        self.queue()
        self._wait_for(self._copied)
        return self._error

    def _wait_for(self, event: torch.Event | None) -> None:
        if event is None:
            return
        try:
            event.synchronize()
        except Exception as error:  # any kernel that failed on the device shows here, perhaps only once
            self._slot.still_written |= not devices.is_over(event)
            self._error = self._error or StagingError(f"the copy from {self.device} failed: {devices.told(error)}")

    def differs(self) -> tuple[int, int] | None:
        """The (offset, bytes) in the slot of the first block whose sum is not the one that save() queued; None if all agree.

        Call it when the copies are done.
        """
        if self._sums is None:
            return None
        with devices.on_stream(self._side):
            expected = self._sums.cpu().numpy()
        for row, found in zip(self._plan.rows, sums_of_slot(self._plan.rows, self._slot.buffer), strict=True):
            wrong = (found != expected[row.at : row.at + row.count]).nonzero()[0]
            if len(wrong):
                return next(row.bytes_of(int(wrong[0])))
        return None

    def free(self) -> None:
        """Forget the tensors, the scratch memory and the views of the slot: others keep this object for its events."""
        self._sources, self._counted, self._versions, self._sums = [], (), [], None
        del self._plan, self._targets


def queue_copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Queue the copy of a device's tensor into contiguous memory of the host on the current stream.

    The device first makes a strided source contiguous. If it has no memory for that, the copy is cut in two, again and again.
    """
    try:
        target.copy_(source, non_blocking=True)
    except RuntimeError as error:
        if source.is_contiguous() or not devices.is_out_of_memory(error):
            raise
        dim = next(dim for dim, size in enumerate(source.shape) if size > 1)
        for part, part_source in zip(target.tensor_split(2, dim), source.tensor_split(2, dim), strict=True):
            queue_copy(part, part_source)


def leaf_at(offset: int, starts: Sequence[int]) -> int:
    """The position of the leaf that has the byte at `offset` of the slot; `starts` has the offsets of all leaves."""
    return bisect_right(starts, offset) - 1


def cloned(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
    """Clones of tensors on a device, and whether save() must wait for the copy of each.

    Clones take at most CLONED_BYTES_MAX, and no more than the device has left. A tensor without a clone is
    copied itself, and save() must wait for that copy.
    """
    sources: list[torch.Tensor] = []
    left = CLONED_BYTES_MAX
    for tensor in tensors:
        source = tensor
        if tensor.nbytes <= left:
            try:
                source = bits(tensor.detach()).clone()
                left -= tensor.nbytes
            except RuntimeError as error:
                if not devices.is_out_of_memory(error):
                    raise
                left = -1
        sources.append(source)
    return sources, [source is tensor for source, tensor in zip(sources, tensors, strict=True)]
