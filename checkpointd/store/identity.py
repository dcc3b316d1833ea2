"""Tells whether a root is still the same directory: a capability of stores on a file system.

A root can be removed and made again while a store is open: the store tells the two apart, and can be told that a new job began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class Identity:
    """The root's file system and inode number, and when the inode of one object in it last changed, in ns (0: not known)."""

    device: int
    number: int
    object_touched_ns: int

    def is_same_root(self, other: Identity) -> bool:
        """Whether both are of one directory, told by its number or by the object, whose bytes the caller has compared.

        Mounted anew, a file system may have another device number, as on NFS. An overlay or FUSE may number inodes anew
        whenever the kernel drops its caches. Nobody can set when an inode changed, so no copy takes that along.
        """
        if self.object_touched_ns and self.object_touched_ns == other.object_touched_ns:
            return True
        return (self.device, self.number) == (other.device, other.number)


@runtime_checkable
class SupportsIdentity(Protocol):
    """A store that can tell its root from another one at the same place."""

    async def identity(self, key: str) -> Identity | None:
        """Of the root now, and of the object `key` in it. NotFoundError where one is not there; None: it cannot tell."""
        ...

    def forget_synced(self) -> None:
        """The root may be another directory than before: nothing that was made durable there stands for what is there now."""
        ...


async def identity_of(store: Store, key: str) -> Identity | None:
    """The same for any store; None where it cannot tell."""
    return await store.identity(key) if isinstance(store, SupportsIdentity) else None


def forget_synced(store: Store) -> None:
    """The same for any store; those that remember nothing of that kind do nothing."""
    if isinstance(store, SupportsIdentity):
        store.forget_synced()
