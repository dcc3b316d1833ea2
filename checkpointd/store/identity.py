"""Tells whether a root is still the same directory: a capability of stores on a file system.

A root can be removed and made again while a store is open. The store tells the two apart, and forgets its old syncs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeGuard, runtime_checkable

from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class Identity:
    """The root's file system and inode number, and when the inode of one of its objects last changed, in ns (0: not known)."""

    device: int
    number: int
    object_touched_ns: int

    def is_same_root(self, other: Identity) -> bool:
        """Whether both are the same directory: the numbers agree, or the times of the object, which the caller has compared.

        A file system may get another device number when it is mounted again, as on NFS. An overlay or FUSE may give inodes new
        numbers whenever the kernel drops its caches. Nobody can set the time at which an inode changed, so a copy never has it.
        """
        if self.object_touched_ns and self.object_touched_ns == other.object_touched_ns:
            return True
        return (self.device, self.number) == (other.device, other.number)


@runtime_checkable
class SupportsIdentity(Protocol):
    """A store that can tell its root from another root at the same path."""

    async def identity(self, key: str) -> Identity | None:
        """The root's identity now, with its object `key`. NotFoundError if one is missing; None if the store cannot tell."""
        ...

    def forget_synced(self) -> None:
        """The root may be another directory now: do not rely on any earlier sync."""
        ...


async def identity_of(store: Store, key: str) -> Identity | None:
    """The identity for any store; None if it cannot tell."""
    return await store.identity(key) if _tells(store) else None


def forget_synced(store: Store) -> None:
    """The same for any store; does nothing for a store that does not remember syncs."""
    if _tells(store):
        store.forget_synced()


def _tells(store: Store) -> TypeGuard[SupportsIdentity]:
    return _is_able(type(store))


@cache
def _is_able(kind: type[Store]) -> bool:
    """Each look at a log asks, and Python looks through all names of the protocol."""
    return issubclass(kind, SupportsIdentity)
