"""The snapshots' memory as the daemon sees it: descriptors that clients handed over, mapped read-only.

Invariants
  E1  Only a memfd of ordinary pages that can neither shrink nor grow is mapped: no client can make a read here end in SIGBUS.
  E2  A slot stays mapped while anybody uses it or a client has it, and goes with the last of them.
  E3  What is mapped for one client, and for all, stays below the bounds.
  E4  One memfd is one slot, however often it is handed over: who uses it is known whichever connection asks.
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

from checkpointd.errors import UsageError
from checkpointd.pipeline.shard import Bytes

_F_GET_SEALS, _SEALS = 1034, 0x0002 | 0x0004
"""F_SEAL_SHRINK and F_SEAL_GROW."""

FileId = tuple[int, int]
"""Device and inode of a memfd: the same for every descriptor of it."""


@dataclass(slots=True)
class Account:
    """Bytes mapped, and how many may be."""

    limit: int
    used: int = 0

    def take(self, nbytes: int) -> None:
        """Raise UsageError where there is no room."""
        if self.used + nbytes > self.limit:
            raise UsageError(
                f"{nbytes} bytes more do not fit: {self.used} of {self.limit} bytes are in use; "
                "give the daemon more memory (memory_bytes_max) or save less per rank"
            )
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes


@dataclass(eq=False, slots=True)
class SlotMemory:
    """One memfd, mapped. Users read it; owners are the clients that have it, and hear each time that its last user has gone."""

    descriptor: int
    nbytes: int
    on_unmapped: Callable[[SlotMemory], None]
    _image: Bytes | None
    _users: set[object] = field(default_factory=set)
    _owners: dict[object, Callable[[], None]] = field(default_factory=dict)

    @property
    def image(self) -> Bytes:
        assert self._image is not None, "the slot was unmapped"
        return self._image

    @property
    def mark(self) -> int:
        """The slot's last 8 bytes, which its client writes when a snapshot is whole."""
        return int(self.image[-8:].view("<u8")[0])

    @property
    def in_use(self) -> bool:
        return bool(self._users)

    @property
    def mapped(self) -> bool:
        return self._image is not None

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
        if self._users or self._owners or self._image is None:
            return
        self._image = None  # what still holds a view keeps the mapping until it goes
        os.close(self.descriptor)
        self.on_unmapped(self)


class Memory:
    """All slots of all clients, below `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self.account = Account(limit)
        self._slots: dict[FileId, SlotMemory] = {}

        self._lingering: list[tuple[weakref.ref[mmap.mmap], int]] = []
        """Mappings of slots that are gone, which something may still hold (an error, with the frames that it came through), and
        their bytes."""

    def __len__(self) -> int:
        return len(self._slots)

    def release_lingering(self) -> int:
        """See that what is gone is unmapped, and not only when Python happens to collect its cycles; how many are left."""
        self._forget_unmapped()
        if self._lingering:
            gc.collect()
            self._forget_unmapped()
        return len(self._lingering)

    def _forget_unmapped(self) -> None:
        self._lingering = [(mapped, nbytes) for mapped, nbytes in self._lingering if mapped() is not None]

    def map(self, descriptor: int, nbytes: int, owner: object, on_idle: Callable[[], None]) -> SlotMemory:
        """The slot of `nbytes` that `descriptor` is, mapped and owned by `owner`. Takes the descriptor, also where it raises.

        UsageError where it is not such memory (E1), or there is no room (E3).
        """
        try:
            file = _check(descriptor, nbytes)
            slot = self._slots.get(file)
            if slot is None:
                slot = self._slots[file] = self._map(descriptor, nbytes, file)
        except BaseException:
            os.close(descriptor)
            raise
        if slot.descriptor != descriptor:
            os.close(descriptor)
        slot.own(owner, on_idle)
        return slot

    def _map(self, descriptor: int, nbytes: int, file: FileId) -> SlotMemory:
        self._forget_unmapped()
        if self.account.used + sum(size for _, size in self._lingering) + nbytes > self.account.limit:
            self.release_lingering()  # so that E3 holds for the machine's memory, and not only in the books
        self.account.take(nbytes)
        try:
            mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError, OverflowError) as error:
            self.account.give_back(nbytes)
            raise UsageError(f"a slot of {nbytes} bytes cannot be mapped: {error}") from error

        def forget(slot: SlotMemory) -> None:
            del self._slots[file]
            self.account.give_back(slot.nbytes)
            self._lingering.append((held, slot.nbytes))

        held = weakref.ref(mapped)
        return SlotMemory(descriptor, nbytes, forget, np.frombuffer(mapped, dtype=np.uint8))


def _check(descriptor: int, nbytes: int) -> FileId:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise UsageError("a slot must be a memfd; what came is another kind of file") from error
    if seals & _SEALS != _SEALS:
        raise UsageError("a slot must be sealed against shrinking and growing (F_SEAL_SHRINK, F_SEAL_GROW)")
    if os.fstatvfs(descriptor).f_bsize != mmap.PAGESIZE:
        # A hole punched into huge pages needs a free one when it is read, and SIGBUS comes where there is none.
        raise UsageError("a slot must be a memfd of ordinary pages, not of huge ones")
    found = os.fstat(descriptor)
    if found.st_size != nbytes or nbytes <= 0 or nbytes % mmap.PAGESIZE:
        raise UsageError(f"a slot has {found.st_size} bytes, and {nbytes} were announced; it must be a whole number of pages")
    return found.st_dev, found.st_ino
