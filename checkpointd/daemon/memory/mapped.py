"""The slots' memory in the daemon: descriptors from clients, mapped read-only.

Invariants
  SLOTMAP-1  Only a memfd of ordinary pages that can neither shrink nor grow is mapped: no client can make a read here end in
      SIGBUS. Nor does it get holes after it was looked at (SLOTMAP-5): F_SEAL_FUTURE_WRITE lets nobody punch any.
  SLOTMAP-2  A slot stays mapped while anybody uses it or a client has it, and goes with the last of them.
  SLOTMAP-3  A slot is charged with its whole size to the user who handed it over, from before it is mapped until nothing in
      this process holds its mapping any more.
  SLOTMAP-4  One memfd is one slot, however often it is handed over: who uses it is known whichever connection asks. It is one
      user's.
  SLOTMAP-5  What is read has no holes: reading one would allocate memory at this process's cost.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from checkpointd.daemon.accounts import Account, Charge
from checkpointd.errors import SidecarFullError, UsageError
from checkpointd.pipeline.shard import Bytes

_F_GET_SEALS, _SEALS = 1034, 0x0002 | 0x0004 | 0x0010
"""F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE."""
_BLOCK = 512
"""Bytes of what `st_blocks` counts."""

FileId = tuple[int, int]
"""Device and inode of a memfd: the same for every descriptor of it."""


@dataclass(eq=False, slots=True)
class SlotMemory:
    """One memfd, mapped. Users read it; owners are the clients that have it, and hear each time that its last user has gone."""

    descriptor: int
    nbytes: int
    account: Account
    on_unmapped: Callable[[SlotMemory], None]
    _buffer: Bytes | None
    _users: set[object] = field(default_factory=set)
    _owners: dict[object, Callable[[], None]] = field(default_factory=dict)

    @property
    def buffer(self) -> Bytes:
        assert self._buffer is not None, "the slot was unmapped"
        return self._buffer

    @property
    def mark(self) -> int:
        """The slot's last 8 bytes, which its client writes when a snapshot is whole."""
        return int(self.buffer[-8:].view("<u8")[0])

    def check_whole(self, nbytes: int) -> None:
        """UsageError where one of its first `nbytes` bytes was never written (SLOTMAP-5)."""
        assert self._buffer is not None, "the slot was unmapped"
        if os.fstat(self.descriptor).st_blocks * _BLOCK >= self.nbytes:
            return
        hole = os.lseek(self.descriptor, 0, os.SEEK_HOLE)
        if hole < nbytes:
            raise UsageError(
                f"the slot has a hole at byte {hole}, and the snapshot takes {nbytes}: write all of it before it is staged"
            )

    @property
    def in_use(self) -> bool:
        return bool(self._users)

    @property
    def mapped(self) -> bool:
        return self._buffer is not None

    def use(self, user: object) -> None:
        self._users.add(user)

    def leave(self, user: object) -> None:
        """`user` will not read the slot again; a second time does nothing."""
        if user not in self._users:
            return
        self._users.discard(user)
        if not self._users:
            for on_idle in list(self._owners.values()):
                on_idle()
            self._unmap_unless_wanted()

    def own(self, owner: object, on_idle: Callable[[], None]) -> None:
        self._owners[owner] = on_idle

    def disown(self, owner: object) -> None:
        """`owner` has gone, or will not use the slot again."""
        self._owners.pop(owner, None)
        self._unmap_unless_wanted()

    def _unmap_unless_wanted(self) -> None:
        if self._users or self._owners or self._buffer is None:
            return
        self._buffer = None  # what still holds a view keeps the mapping until it goes
        os.close(self.descriptor)
        self.on_unmapped(self)


class SlotMappings:
    """All slots of all clients."""

    def __init__(self) -> None:
        self._slots: dict[FileId, SlotMemory] = {}
        self._lingering: list[tuple[weakref.ref[mmap.mmap], Charge]] = []
        """Mappings of slots that are gone, which something may still hold (an error, with the frames that it came through)."""

    def __len__(self) -> int:
        return len(self._slots)

    def release_lingering(self) -> int:
        """See that what is gone is unmapped, and not only when Python happens to collect its cycles; how many are left."""
        self.settle()
        if self._lingering:
            gc.collect()
            self.settle()
        return len(self._lingering)

    def settle(self) -> None:
        """Give back what was charged for mappings that nothing holds any more."""
        lingering = self._lingering
        self._lingering = [(mapped, charge) for mapped, charge in lingering if mapped() is not None]
        for mapped, charge in lingering:
            if mapped() is None:
                charge.release()

    def map(self, descriptor: int, nbytes: int, account: Account, owner: object, on_idle: Callable[[], None]) -> SlotMemory:
        """The slot of `nbytes` that `descriptor` is, mapped, charged to `account` and owned by `owner`. Takes the descriptor,
        also where it raises.

        UsageError where it is not such memory (SLOTMAP-1), or another user's (SLOTMAP-4); SidecarFullError where there is no
        room (SLOTMAP-3).
        """
        try:
            file = _check(descriptor, nbytes)
            slot = self._slots.get(file)
            if slot is None:
                slot = self._slots[file] = self._map(descriptor, nbytes, account, file)
            elif slot.account is not account:
                raise UsageError("another user has handed over this slot")
        except BaseException:
            os.close(descriptor)
            raise
        if slot.descriptor != descriptor:
            os.close(descriptor)
        slot.own(owner, on_idle)
        return slot

    def _map(self, descriptor: int, nbytes: int, account: Account, file: FileId) -> SlotMemory:
        charge = self._charged(account, nbytes)
        try:
            mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            charge.release()
            raise UsageError(f"a slot of {nbytes} bytes cannot be mapped: {error}") from error

        def forget(_: SlotMemory) -> None:
            del self._slots[file]
            self._lingering.append((held, charge))
            self.settle()

        held = weakref.ref(mapped)
        return SlotMemory(descriptor, nbytes, account, forget, np.frombuffer(mapped, dtype=np.uint8))

    def _charged(self, account: Account, nbytes: int) -> Charge:
        try:
            return Charge.of(account, nbytes)
        except SidecarFullError:
            self.release_lingering()
            return Charge.of(account, nbytes)


def _check(descriptor: int, nbytes: int) -> FileId:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise UsageError("a slot must be a memfd; what came is another kind of file") from error
    if seals & _SEALS != _SEALS:
        raise UsageError(
            "a slot must be sealed: F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE (since Linux 5.1) are needed"
        )
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        # A hole punched into huge pages needs a free one when it is read, and SIGBUS comes where there is none.
        raise UsageError("a slot must be a memfd of ordinary pages, not of huge ones")
    found = os.fstat(descriptor)
    if found.st_size != nbytes or nbytes <= 0 or nbytes % mmap.PAGESIZE:
        raise UsageError(f"a slot has {found.st_size} bytes, and {nbytes} were announced; it must be a whole number of pages")
    return found.st_dev, found.st_ino
