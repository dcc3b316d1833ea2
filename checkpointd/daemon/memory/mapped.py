"""The memory of the slots in the daemon: maps descriptors from clients read-only.

Invariants
  SLOTMAP-1  Only a memfd of ordinary pages that can neither shrink nor grow is mapped, so no client can make a read here end in
      SIGBUS. F_SEAL_FUTURE_WRITE keeps everybody from punching holes into it after it was checked (SLOTMAP-5).
  SLOTMAP-2  A slot stays mapped while a job or the tier uses it or a client owns it, and is unmapped after the last of them.
  SLOTMAP-3  The whole size of a slot is charged to the user who sent it, from before it is mapped until nothing in this process
      refers to the mapping.
  SLOTMAP-4  One memfd is one slot of one user, even if several connections send it. So its users are known on every connection.
  SLOTMAP-5  The bytes that are read have no holes: reading a hole would allocate memory that counts for this process.
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
"""Bytes of a block in `st_blocks`."""

FileId = tuple[int, int]
"""Device and inode of a memfd: the same for every descriptor of it."""


@dataclass(eq=False, slots=True)
class SlotMemory:
    """One mapped memfd. Users read it. Owners are the clients that have it; they hear when the last user leaves."""

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
        """UsageError if one of the first `nbytes` bytes was never written (SLOTMAP-5)."""
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

    def use(self, user: object) -> None:
        self._users.add(user)

    def leave(self, user: object) -> None:
        """`user` reads the slot no longer; a second call does nothing."""
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
        """`owner` has gone or uses the slot no longer."""
        self._owners.pop(owner, None)
        self._unmap_unless_wanted()

    def _unmap_unless_wanted(self) -> None:
        if self._users or self._owners or self._buffer is None:
            return
        self._buffer = None  # the mapping ends when the last view of it is gone
        os.close(self.descriptor)
        self.on_unmapped(self)


class SlotMappings:
    """All slots of all clients."""

    def __init__(self) -> None:
        self._slots: dict[FileId, SlotMemory] = {}
        self._lingering: list[tuple[weakref.ref[mmap.mmap], Charge]] = []
        """Mappings of removed slots that something may still refer to, such as the frames of an error."""

    def __len__(self) -> int:
        return len(self._slots)

    def release_lingering(self) -> int:
        """Collect garbage until removed slots are unmapped, if possible. Returns how many mappings are left."""
        self.settle()
        if self._lingering:
            gc.collect()
            self.settle()
        return len(self._lingering)

    def settle(self) -> None:
        """Release the charges of mappings that nothing refers to any longer."""
        lingering = self._lingering
        self._lingering = [(mapped, charge) for mapped, charge in lingering if mapped() is not None]
        for mapped, charge in lingering:
            if mapped() is None:
                charge.release()

    def map(self, descriptor: int, nbytes: int, account: Account, owner: object, on_idle: Callable[[], None]) -> SlotMemory:
        """Map the slot of `nbytes` behind `descriptor`, charge it to `account` and add `owner`. Takes over the
        descriptor, even if it raises.

        UsageError if the memory is not suitable (SLOTMAP-1) or another user's (SLOTMAP-4); SidecarFullError if there is no room
        (SLOTMAP-3).
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
        raise UsageError("a slot must be a memfd; this is another kind of file") from error
    if seals & _SEALS != _SEALS:
        raise UsageError(
            "a slot must be sealed: F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_FUTURE_WRITE (since Linux 5.1) are needed"
        )
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        # Reading a hole in huge pages needs a free huge page, and ends in SIGBUS if there is none.
        raise UsageError("a slot must be a memfd of ordinary pages, not of huge ones")
    found = os.fstat(descriptor)
    if found.st_size != nbytes or nbytes <= 0 or nbytes % mmap.PAGESIZE:
        raise UsageError(f"a slot has {found.st_size} bytes, and {nbytes} were announced; it must be a whole number of pages")
    return found.st_dev, found.st_ino
