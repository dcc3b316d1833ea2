"""The arena: host memory for snapshots, in slots that are used again.

Invariants
  ARENA-1  A slot belongs to one snapshot at a time. It becomes free only when nobody reads it any more.
  ARENA-2  A slot's memory is a sealed memfd in a shared mapping: it never shrinks or grows. A process that gets the descriptor
      can only read the memory. Only this process writes it, through the mapping that it made before the seal.
  ARENA-3  A slot is allocated when a save first needs it, or by `prewarm`, and replaced only while it is free.
  ARENA-4  A slot that a lost sidecar may still read is never used again: its bytes must not change while the sidecar reads.
  ARENA-5  A slot into which a device may still copy is never used again, and keeps its memory until the process ends.
  ARENA-6  Ctrl-C at any point of `acquire` or `release` loses no slot, if the caller then releases the hold.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from checkpointd.phrases import byte_size
from checkpointd.pipeline.pages import page_up
from checkpointd.pipeline.shard import PAGE, Bytes
from checkpointd.system_errors import in_words
from checkpointd_client import devices

log = logging.getLogger("checkpointd")

_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 16
_PIECE = 4 << 20
"""Memory is allocated in pieces of this many bytes. A piece takes about 3 ms, in which no thread can map or unmap memory."""
POPULATING_THREADS = 4
"""The most threads that allocate a slot's memory together."""
_VIEWS_MAX = 3
"""For how many lists of parts a slot keeps its views: those of one plan of the stager."""
_NUMBERS = itertools.count()
_UNSAFE: list[Slot] = []
"""Slots that are kept for ARENA-5."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class Slot:
    """Memory for one snapshot: `capacity` bytes at `buffer` (numpy) and `memory` (torch, uint8), the same bytes. Raises
    MemoryError, with the reason, if the system refuses it.
    """

    def __init__(self, capacity: int) -> None:
        self.number = next(_NUMBERS)
        self.is_released = False
        self.lost = False
        """Whether the connection to a sidecar that may still read the slot is lost (ARENA-4)."""
        self.still_written = False
        """Whether a device failed so that its copies into the slot may not have ended (ARENA-5)."""
        self.capacity = page_up(max(capacity, 1))
        self.nbytes = self.capacity + PAGE
        """The capacity and the page of the completion marker."""
        try:
            self._map, self.fd = _sealed(self.nbytes)
        except OSError as error:
            raise MemoryError(f"no memory of {byte_size(self.nbytes)} for a snapshot: {in_words(error, 'snapshot')}") from error
        whole: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.buffer: Bytes = whole[: self.capacity]
        self._mark = whole[-8:].view("<u8")
        self.token = 0
        with torch.inference_mode(False):  # threads in another mode copy into it
            self.memory = torch.from_numpy(self.buffer)
        self._pinning: devices.Pinning | None = None
        self._pinned_on = 0
        self._tried_pinning = False
        self._populated = 0
        """The bytes at the beginning that have real memory."""
        self._views: list[tuple[object, list[torch.Tensor]]] = []

    def begin(self) -> int:
        """Prepare for a snapshot; returns its token, from 1 to 2^63 - 1."""
        self._mark[0] = 0
        self.buffer[0] = 0  # a state without tensors takes a page that nothing else writes, and a sidecar refuses holes
        self.token = secrets.randbelow((1 << 63) - 1) + 1
        return self.token

    def complete(self) -> None:
        """Write the completion marker, the token, to the last 8 bytes: a sidecar finds it there if this process dies."""
        self._mark[0] = self.token

    def populate(self, nbytes: int) -> None:
        """Make the kernel allocate the first `nbytes` now, on several threads that release the GIL. A second call is cheap.

        Page by page, as a copy would allocate them, it takes several times as long.
        """
        end = page_up(min(nbytes, self.capacity))
        address, pieces = self.buffer.ctypes.data, iter(range(self._populated, end, _PIECE))
        count = min(POPULATING_THREADS, len(os.sched_getaffinity(0)), (end - self._populated) // _PIECE)
        others = [
            threading.Thread(target=_populate, args=(address, pieces, end), name="checkpointd-populate", daemon=True)
            for _ in range(count - 1)
        ]
        for thread in others:
            thread.start()
        _populate(address, pieces, end)
        for thread in others:
            thread.join()
        self._populated = max(self._populated, end)

    def populate_gently(self, nbytes: int, hurried: threading.Event) -> None:
        """The same beside training: on this thread alone, which rests as long as it works, until `hurried` is set."""
        end, address = page_up(min(nbytes, self.capacity)), self.buffer.ctypes.data
        while self._populated < end and not hurried.is_set():
            began = time.monotonic()
            reached = min(self._populated + _PIECE, end)
            _populate(address, iter((self._populated,)), reached)
            self._populated = reached
            hurried.wait(time.monotonic() - began)
        self.populate(nbytes)

    def pin(self, kind: str) -> None:
        """Register the memory, once, with devices of `kind` (`torch.device.type`), so that their copies run asynchronously."""
        if self._tried_pinning:
            return
        self._tried_pinning = True
        pinning = devices.PINNING.get(kind)
        code = pinning.register(self.buffer.ctypes.data, self.capacity) if pinning else None
        if pinning is None or code != 0:
            why = f"error {code}" if pinning else f"torch offers no call for {kind} devices"
            log.warning("the arena cannot be pinned (%s): the next step waits for the copies from the device", why)
            return
        self._pinning, self._pinned_on = pinning, torch.accelerator.current_device_index()

    def views(self, parts: list[tuple[int, int, torch.dtype, tuple[int, ...]]]) -> list[torch.Tensor]:
        """A tensor over this memory for each part (offset, bytes, dtype, shape). Those of the last lists are remembered."""
        known = next((views for made_of, views in self._views if made_of is parts), None)
        if known is None:
            known = [self.memory[at : at + n].view(dtype).view(shape) for at, n, dtype, shape in parts]
        self._views = [(parts, known), *(pair for pair in self._views if pair[0] is not parts)][:_VIEWS_MAX]
        return known

    def release(self) -> None:
        """Give the memory back. A view that is still in use keeps the mapping alive until the view is gone.

        A second call does nothing.
        """
        if self.is_released:
            return
        self.is_released = True
        if self.still_written:
            _UNSAFE.append(self)
            return
        if self._pinning:
            with torch.accelerator.device_index(self._pinned_on):  # on device 0, it would start the driver there
                self._pinning.unregister(self.buffer.ctypes.data)
            self._pinning = None
        self._views = []
        del self.memory, self.buffer, self._mark
        with contextlib.suppress(BufferError):
            self._map.close()
        os.close(self.fd)


def _sealed(nbytes: int) -> tuple[mmap.mmap, int]:
    """A mapping of new memory (ARENA-2), and a descriptor through which it can only be read."""
    writable = os.memfd_create("checkpointd-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(writable, nbytes)
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return mmap.mmap(writable, nbytes), _read_only(writable)
    finally:
        os.close(writable)


def _populate(address: int, pieces: Iterator[int], end: int) -> None:
    for start in pieces:
        length = min(_PIECE, end - start)
        if _LIBC.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            return  # an older kernel: it allocates the pages at the first copy


def _read_only(writable: int) -> int:
    """A read-only descriptor of the same memory. Since Linux 5.1, the seal forbids writing through any descriptor."""
    with contextlib.suppress(OSError):  # an older kernel does not know the seal, and a sidecar refuses the slot
        fcntl.fcntl(writable, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    os.fchmod(writable, 0o400)  # a memfd begins as 0777, so a process that has a descriptor could open a writable one
    return os.open(f"/proc/self/fd/{writable}", os.O_RDONLY | os.O_CLOEXEC)


class SlotHold:
    """One snapshot's hold on a slot. It is made before the slot is acquired, so an interruption cannot lose the slot."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.held: Slot | None = None
        """The slot, once there is one. The arena sets it."""

    @property
    def slot(self) -> Slot:
        """The slot of a hold that has acquired one."""
        assert self.held is not None
        return self.held

    def release(self) -> None:
        """Give the slot back: nobody reads or writes it for this snapshot any more. A second call does nothing."""
        self._arena.release(self)


class Arena:
    """Two slots; see the invariants above. Thread-safe. `on_gone` is called with the number of each slot that is replaced.

    All state is in two lists: the slots, and the holds that were not released yet. A slot that no hold has is free.
    """

    def __init__(self, slots: int = 2, on_gone: Callable[[int], None] = lambda _: None) -> None:
        self._on_gone = on_gone
        self._count = slots
        self._slots: list[Slot] = []
        self._holds: list[SlotHold] = []
        self._lock = threading.RLock()
        """Taken by `with` directly: a Condition takes it in Python code, where Ctrl-C could leave it locked."""
        self._change = threading.Condition(self._lock)
        self._closed = False

    @property
    def _free(self) -> list[Slot]:
        """The slots that no hold has."""
        held = [hold.held for hold in self._holds]
        return [slot for slot in self._slots if slot not in held]

    def acquire(self, hold: SlotHold, nbytes: int, timeout: float | None) -> bool:
        """Give `hold` a free slot of at least `nbytes`; False if none becomes free within `timeout` seconds (0: do not wait).

        If this raises, release the hold.
        """
        with self._lock:
            free = self._change.wait_for(lambda: self._closed or len(self._holds) < self._count, timeout)
            if not free or self._closed:
                return False
            self._holds.append(hold)
            hold.held = self._best(nbytes)
        slot = hold.held
        if slot is None or slot.capacity < nbytes:
            if slot is not None:
                self._discard(slot)
            self._make(hold, nbytes)
        return True

    def _best(self, nbytes: int) -> Slot | None:
        """The smallest free slot that fits, else one that is too small and will be replaced, else None."""
        free = self._free
        return min([slot for slot in free if slot.capacity >= nbytes] or free, key=lambda slot: slot.capacity, default=None)

    def _make(self, hold: SlotHold, nbytes: int) -> Slot:
        slot = hold.held = Slot(nbytes)  # in one line: from here on `release` finds it
        with self._lock:
            self._slots.append(slot)
        return slot

    def _discard(self, slot: Slot) -> None:
        """Forget `slot`. If this is interrupted, `release` does it again."""
        slot.release()
        self._on_gone(slot.number)
        with self._lock:
            self._slots = [other for other in self._slots if other is not slot]

    def release(self, hold: SlotHold) -> None:
        """Take the slot of `hold` back: nobody reads it any more. This does nothing if the hold has none."""
        with self._lock:
            if hold not in self._holds:
                return
            slot = hold.held
            if slot is not None and self._closed:
                slot.release()
            elif slot is not None and (slot.lost or slot.still_written or slot.is_released):
                self._discard(slot)
            elif slot is not None and slot not in self._slots:
                self._slots.append(slot)
            self._holds.remove(hold)
            self._change.notify()

    def prewarm(self, nbytes: int, hurried: threading.Event, *, device: torch.device | None, slots: int = 1) -> None:
        """Allocate one more slot with `nbytes` of real memory, unless `slots` exist already. Call it on a background thread.

        Set `hurried` when a save waits for it. `device`: pin the memory for that device. None: do not pin it.
        """
        hold = SlotHold(self)
        with self._lock:
            there = len(self._free) + len(self._holds)
            if self._closed or there >= min(slots, self._count):
                return
            self._holds.append(hold)
        try:
            slot = self._make(hold, nbytes)
            slot.populate_gently(nbytes, hurried)
            if device is not None:
                torch.accelerator.set_device_index(device)  # for this thread: elsewhere, pinning would create a context
                slot.pin(device.type)
        except Exception as error:  # of the system or of the device's driver
            log.warning("the arena cannot be prewarmed with %d bytes: %s; the save that needs it allocates it", nbytes, error)
            if hold.held is not None:
                self._discard(hold.held)
        finally:
            self.release(hold)

    def close(self) -> None:
        """Give the memory of all free slots back. A busy slot follows when it is released."""
        with self._lock:
            self._closed = True
            for slot in self._free:
                slot.release()
            self._change.notify_all()
