"""The snapshots' memory as the daemon sees it: descriptors that clients handed over, mapped read-only.

Invariants
  E1  Only a memfd that can neither shrink nor grow is mapped: no client can make a read here end in SIGBUS.
  E2  A slot stays mapped while anybody uses it, and goes with its last user.
  E3  What is mapped for one client, and for all, stays below the bounds.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from checkpointd.errors import UsageError
from checkpointd.pipeline.shard import Bytes

_F_GET_SEALS, _SEALS = 1034, 0x0002 | 0x0004
"""F_SEAL_SHRINK and F_SEAL_GROW."""


@dataclass(slots=True)
class Account:
    """Bytes mapped, and how many may be; `parent` bounds all clients together."""

    limit: int
    parent: Account | None = None
    used: int = 0

    def take(self, nbytes: int) -> None:
        """Raise UsageError where there is no room."""
        if self.used + nbytes > self.limit:
            raise UsageError(
                f"a slot of {nbytes} bytes does not fit: {self.used} of {self.limit} bytes are in use; "
                "give the daemon more memory (memory_bytes_max) or save less per rank"
            )
        if self.parent is not None:
            self.parent.take(nbytes)
        self.used += nbytes

    def give_back(self, nbytes: int) -> None:
        self.used -= nbytes
        if self.parent is not None:
            self.parent.give_back(nbytes)


@dataclass(eq=False, slots=True)
class SlotMemory:
    """One slot of one client. `on_idle` is called each time its last user has gone."""

    descriptor: int
    nbytes: int
    account: Account
    on_idle: Callable[[SlotMemory], None] = lambda _: None
    _image: Bytes | None = None
    _users: set[object] = field(default_factory=set)

    @property
    def image(self) -> Bytes:
        assert self._image is not None, "the slot was unmapped"
        return self._image

    @property
    def in_use(self) -> bool:
        return bool(self._users)

    def use(self, user: object) -> None:
        self._users.add(user)

    def leave(self, user: object) -> None:
        """`user` will not read the slot again; a second time does nothing."""
        if user not in self._users:
            return
        self._users.discard(user)
        if not self._users:
            self.on_idle(self)

    def unmap(self) -> None:
        """Give the memory up. What still holds a view keeps the mapping until it goes."""
        if self._image is None:
            return
        self._image = None
        os.close(self.descriptor)
        self.account.give_back(self.nbytes)


def map_slot(descriptor: int, nbytes: int, account: Account) -> SlotMemory:
    """Map `nbytes` of `descriptor`, which is closed where this raises. UsageError where it is not such memory (E1)."""
    try:
        size = _check(descriptor, nbytes)
        account.take(size)
        try:
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            account.give_back(size)
            raise
    except BaseException:
        os.close(descriptor)
        raise
    return SlotMemory(descriptor, size, account, _image=np.frombuffer(mapped, dtype=np.uint8))


def _check(descriptor: int, nbytes: int) -> int:
    try:
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise UsageError("a slot must be a memfd; what came is another kind of file") from error
    if seals & _SEALS != _SEALS:
        raise UsageError("a slot must be sealed against shrinking and growing (F_SEAL_SHRINK, F_SEAL_GROW)")
    size = os.fstat(descriptor).st_size
    if size != nbytes or size <= 0 or size % mmap.PAGESIZE:
        raise UsageError(f"a slot has {size} bytes, and {nbytes} were announced; it must be a whole number of pages")
    return size
