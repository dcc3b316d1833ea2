"""Uploads: copy verified bytes to a device, through pinned host memory, while the next chunks are read.

A thread that has verified a chunk writes its elements into a pinned block, queues their copy on a side stream, and goes on. A
full block is used again once its copies are done.

Invariants
  UPLOAD-1  The side stream waits for all that the caller's current stream had queued before the first bytes came, and the
      caller's stream waits for the side stream. When a load returns, the device holds the bytes; if a copy failed, it raises.
  UPLOAD-2  The host writes into a block only when every copy out of it is done.
  UPLOAD-3  One load pins at most `pinned_bytes` for all devices together, only as it needs them. Threads wait while all blocks
      are in use.
  UPLOAD-4  Blocks are unpinned and freed at the end, also after an error, but never before the copies have ended. If the device
      cannot say that, they stay until the process ends.
  UPLOAD-5  After the end nothing more is queued: bytes that come late, from a read that was given up, raise an error.
  UPLOAD-6  Device memory for the copies into tensors that are not contiguous is made on the side stream. So the allocator gives
      it out again only behind these copies.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.errors import DeviceError
from checkpointd.pipeline.pages import page_buffer, page_up
from checkpointd.pipeline.shard import PAGE, Bytes, aligned
from checkpointd_client import devices
from checkpointd_client.capture.dtypes import bits, copy_bits, empty

log = logging.getLogger("checkpointd")

Fill = Callable[[torch.Tensor, NDArray[Any]], None]
"""Fills a part of a tensor with elements of its own dtype, in an array of the part's sizes whose dtype only carries them.

Runs on any thread, and does not keep the array.
"""

BLOCK_BYTES = 8 << 20
"""The most bytes in one block."""
_CUT_BYTES = 256 << 10
"""Memory is not cut into blocks that are smaller than this."""
_KEPT: list[_Block] = []
"""Blocks that are kept for UPLOAD-4."""


class Uploads:
    """The uploads of one load. Use it in a `with`, on the thread whose current streams use the tensors."""

    def __init__(self, pinned_bytes: int) -> None:
        self._pinned_bytes = pinned_bytes
        self._by_device: dict[torch.device, _DeviceUploads] = {}

    def into(self, target: torch.Tensor, fqn: str) -> Fill:
        """A function that fills parts of `target`. Call this for all targets before any of them is filled."""
        if not devices.has_streams(target.device):
            return fill_at_once
        found = self._by_device.get(target.device)
        if found is None:
            found = self._by_device[target.device] = _DeviceUploads(target.device, self._share)
        found.wanted += target.nbytes
        return partial(found.copy, fqn)

    def _share(self) -> int:
        """The bytes that one device may pin."""
        return self._pinned_bytes // len(self._by_device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with ExitStack() as ends:
            for found in self._by_device.values():
                ends.callback(found.end)
        problem = next((found.problem for found in self._by_device.values() if found.problem is not None), None)
        if problem is not None and kind is None:
            raise problem


def fill_at_once(part: torch.Tensor, elements: NDArray[Any]) -> None:
    """Fill `part` on this thread; for host memory, and for devices without streams."""
    row = np.array(elements, order="C").reshape(-1).view(np.uint8)
    with torch.no_grad():
        copy_bits(part, torch.from_numpy(row).view(part.dtype).view(part.shape).to(part.device))


class _Block:
    """Host memory in which elements wait for their copy. `busy`: the threads that are writing or queueing."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = page_buffer(nbytes)
        self._tensor = torch.from_numpy(self._bytes)
        self._used = 0
        self._pinning: devices.Pinning | None = None
        self.busy = 0
        self.fqns: list[str] = []

    @property
    def is_pinned(self) -> bool:
        return self._pinning is not None

    def pin(self, kind: str) -> str | None:
        """Pin the memory. A device of `kind` must be current. Returns the reason if the memory cannot be pinned, else None."""
        pinning = devices.PINNING.get(kind)
        if pinning is None:
            return f"torch offers no call for {kind} devices"
        try:
            code = pinning.register(self._bytes.ctypes.data, self._bytes.nbytes)
        except Exception as error:  # of the device's driver
            return devices.told(error)
        if code != 0:
            return f"error {code}"
        self._pinning = pinning
        return None

    def has(self, nbytes: int) -> bool:
        return self._used + nbytes <= self._bytes.nbytes

    def reserve(self, nbytes: int, fqn: str) -> tuple[Bytes, torch.Tensor]:
        """The next `nbytes` of this memory, as an array and as a tensor."""
        place = slice(self._used, self._used + nbytes)
        self._used += aligned(nbytes)
        self.busy += 1
        if fqn not in self.fqns[-1:]:
            self.fqns.append(fqn)
        return self._bytes[place], self._tensor[place]

    def empty(self) -> None:
        self._used = 0
        self.fqns.clear()

    def free(self) -> None:
        """Unpin the memory, which is freed with this object."""
        try:
            code = self._pinning.unregister(self._bytes.ctypes.data) if self._pinning else 0
        except Exception as error:
            code, why = -1, devices.told(error)
        else:
            why = f"error {code}"
        if code != 0:
            log.warning("%d bytes of host memory cannot be unpinned, and are kept: %s", self._bytes.nbytes, why)
            _KEPT.append(self)


class _DeviceUploads:
    """The uploads to one device. `wanted`: the bytes of its tensors. `problem`: the first error."""

    def __init__(self, device: torch.device, share: Callable[[], int]) -> None:
        self.wanted = 0
        self.problem: DeviceError | None = None
        self._device, self._share = device, share
        self._caller = torch.accelerator.current_stream(device)
        self._side = torch.Stream(device)
        self._change = threading.Condition()
        self._blocks: list[_Block] = []
        self._open: _Block | None = None
        """The block that is being filled."""
        self._full: deque[tuple[_Block, torch.Event]] = deque()
        """The blocks that are full and queued whole, each with the event of its copies, the oldest first."""
        self._is_refused = False
        """Whether no more memory can be pinned."""
        self._has_ended = False

    # --- on any thread ---------------------------------------------------------------------------------------

    def copy(self, fqn: str, part: torch.Tensor, elements: NDArray[Any]) -> None:
        """Queue the copy of `elements` into `part`. Waits while no block has room. DeviceError if the device fails."""
        try:
            for piece, some in _pieces(part, elements, self._sizes[0]):
                self._copy_piece(fqn, piece, some)
        except DeviceError:
            raise
        except Exception as error:
            raise self._failed(f"{fqn} could not be copied to {self._device}", error) from error

    def _copy_piece(self, fqn: str, part: torch.Tensor, elements: NDArray[Any]) -> None:
        block, memory, row = self._reserved(elements.nbytes, fqn)
        try:
            memory.view(elements.dtype).reshape(elements.shape)[...] = elements
            with devices.on_stream(self._side), torch.no_grad():
                _queue(part, row.view(part.dtype).view(part.shape), non_blocking=block.is_pinned)
        finally:
            self._done_with(block)

    def _reserved(self, nbytes: int, fqn: str) -> tuple[_Block, Bytes, torch.Tensor]:
        with self._change:
            while True:
                if self.problem is not None:
                    raise DeviceError(str(self.problem))
                if self._has_ended:
                    raise DeviceError(f"{fqn} was read after its load had been given up, and is not copied to {self._device}")
                if self._open is not None and self._open.has(nbytes):
                    return self._open, *self._open.reserve(nbytes, fqn)
                self._open_another()

    def _done_with(self, block: _Block) -> None:
        with self._change:
            block.busy -= 1
            if block.busy == 0 and block is not self._open:
                self._record(block)
            self._change.notify_all()

    # --- with the lock -----------------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        return _sizes_of_blocks(self._share(), self.wanted)

    def _open_another(self) -> None:
        """Open another block, or wait until a thread is done with one."""
        full, self._open = self._open, None
        if full is not None and full.busy == 0:
            self._record(full)
        if (self._full and devices.is_over(self._full[0][1])) or (not self._grow() and self._full):
            self._reuse()
        elif self._open is None:
            self._change.wait()

    def _record(self, block: _Block) -> None:
        event = torch.Event(self._device)
        event.record(self._side)
        self._full.append((block, event))

    def _reuse(self) -> None:
        """Open the oldest full block again, once its copies are done (UPLOAD-2)."""
        block, event = self._full.popleft()
        try:
            event.synchronize()
        except Exception as error:  # any kernel that failed on the device shows here
            raise self._failed(f"the copies of {_named(block.fqns)} to {self._device} failed", error) from error
        block.empty()
        self._open = block

    def _grow(self) -> bool:
        """Open a new block, if there may be one more."""
        if len(self._blocks) >= self._sizes[1]:
            return False
        if not self._blocks:
            self._side.wait_stream(self._caller)
        block = _Block(self._sizes[0])
        if self._share() >= PAGE and not self._is_refused:
            with devices.on_stream(self._side):
                why = block.pin(self._device.type)
            if why is not None:
                self._is_refused = True
                log.warning("host memory cannot be pinned (%s): the load waits for copies to %s", why, self._device)
        if not block.is_pinned and any(other.is_pinned for other in self._blocks):
            return False  # a few pinned blocks are faster than more that are not pinned
        self._blocks.append(block)
        self._open = block
        return True

    def _failed(self, what: str, error: Exception) -> DeviceError:
        """The error to raise. Other threads raise the first such error, too."""
        problem = DeviceError(f"{what}: {devices.told(error)}")
        with self._change:
            self.problem = self.problem or problem
            self._change.notify_all()
        return problem

    # --- on the caller's thread ------------------------------------------------------------------------------

    def end(self) -> None:
        """Wait until every copy has ended, and free the blocks. If a copy failed, `problem` is set then."""
        can_free = False
        try:
            with self._change:
                self._has_ended = True
                self._change.notify_all()
                self._change.wait_for(lambda: not any(block.busy for block in self._blocks))
            self._finish()
            can_free = devices.is_over(self._side)
        finally:
            if can_free:
                with devices.on_stream(self._side):  # for the current device: elsewhere, the driver would create a context
                    for block in self._blocks:
                        block.free()
            else:
                _KEPT.extend(self._blocks)
            self._blocks.clear()

    def _finish(self) -> None:
        try:
            self._caller.wait_stream(self._side)
            self._side.synchronize()
        except Exception as error:
            fqns = [fqn for block, _ in self._full for fqn in block.fqns] + (self._open.fqns if self._open else [])
            self._failed(f"the copies of {_named(fqns)} to {self._device} failed", error)


def _sizes_of_blocks(share: int, wanted: int) -> tuple[int, int]:
    """The bytes of a block and the number of blocks, for `wanted` bytes of tensors if `share` bytes may be pinned.

    A share of less than a page pins nothing: a few blocks are then used that are not pinned.
    """
    room = min(share // PAGE * PAGE or 4 * BLOCK_BYTES, page_up(wanted))
    nbytes = max(min(room, _CUT_BYTES), min(BLOCK_BYTES, room // 4 // PAGE * PAGE))
    return nbytes, room // nbytes


def _named(fqns: list[str]) -> str:
    names = list(dict.fromkeys(fqns))
    return f"{names[0]} and others" if len(names) > 1 else "".join(names)


def _queue(part: torch.Tensor, elements: torch.Tensor, *, non_blocking: bool) -> None:
    """Queue the copy of `elements`, in host memory, into `part` on the current stream."""
    if part.is_contiguous() and not part.is_conj() and not part.is_neg():
        bits(part).copy_(bits(elements), non_blocking=non_blocking)
        return
    # A copy into strided memory needs its elements in a row on the device first.
    row = empty(part.shape, part.dtype, part.device)
    bits(row).copy_(bits(elements), non_blocking=non_blocking)
    copy_bits(part, row)


def _pieces(part: torch.Tensor, elements: NDArray[Any], nbytes_max: int) -> Iterator[tuple[torch.Tensor, NDArray[Any]]]:
    """Cut both into pieces of at most `nbytes_max`, along their first dimensions, so that contiguous parts stay contiguous."""
    if elements.nbytes <= nbytes_max:
        yield part, elements
        return
    dim = next(i for i, size in enumerate(elements.shape) if size > 1)
    half = elements.shape[dim] // 2
    for cut in (slice(0, half), slice(half, None)):
        index = (*(slice(None),) * dim, cut)
        yield from _pieces(part[index], elements[index], nbytes_max)
