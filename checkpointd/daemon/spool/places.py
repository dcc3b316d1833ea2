"""Where a spool lies: a directory on this node's disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.errors import StoreError, UsageError
from checkpointd.layout.manifest import digest
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.users import User, groups_of
from checkpointd.system_errors import in_words

T = TypeVar("T")

RESERVE = 0.05
"""The part of the disk that a spool without a limit leaves free, for other programs on this node."""
_READABLE_MAX = 40
_NAME = re.compile(r".+-[0-9a-f]{16}\Z")
"""What `name_of` gives."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes in the spool, and free bytes of its disk."""

    used: int
    free: int
    total: int


class SpoolPlace(Protocol):
    """The directory of a spool. A name is that of one root in it."""

    def open(self, name: str, user: User | None) -> Store:
        """The store for one root, with the rights of `user`."""
        ...

    async def names(self) -> list[str]:
        """The roots in it. Other directories beside them are none of the spool's."""
        ...

    async def owner(self, name: str) -> User | None:
        """The user of the root `name` in the spool; None: this process's own."""
        ...

    async def room(self) -> Room: ...


def name_of(url: str, user: User | None) -> str:
    """The name of the root `url` in a spool: readable, and different for each root and user."""
    place, identity = (parse(url).place, parse(url).identity) if is_bucket_url(url) else (url, url)
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", place.rstrip("/").rpartition("://")[2]).strip("-")[-_READABLE_MAX:]
    whose = "" if user is None else f"-{user.uid}"
    return f"{readable or 'root'}{whose}-{digest(identity.encode())[:16]}"


@dataclass(slots=True)
class DiskPlace:
    """A spool on a disk. Its directory is made if it is missing. Each root has a directory below it that only the root's user
    may enter. UsageError if it cannot be used.
    """

    directory: str

    def __post_init__(self) -> None:
        try:
            os.makedirs(self.directory, mode=0o711, exist_ok=True)
            found = os.stat(self.directory)
        except OSError as error:
            raise UsageError(
                f"the spool {self.directory} cannot be made: {in_words(error, 'spool', os.path.dirname(self.directory))}"
            ) from error
        if not stat.S_ISDIR(found.st_mode) or not os.access(self.directory, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
            raise UsageError(f"the spool {self.directory} must be a directory in which this user may write")

    def open(self, name: str, user: User | None) -> Store:
        path = f"{self.directory}/{name}"
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            if user is not None and os.stat(path).st_uid != user.uid:
                os.chown(path, user.uid, user.gid)
        except OSError as error:
            raise StoreError(f"the spool {path} cannot be made: {in_words(error, 'spool', self.directory)}") from error
        return PosixStore(path, anchor=self.directory, user=user)

    async def names(self) -> list[str]:
        return await self._aside(self._names)

    def _names(self) -> list[str]:
        with os.scandir(self.directory) as found:
            return sorted(one.name for one in found if _NAME.match(one.name) and one.is_dir(follow_symlinks=False))

    async def owner(self, name: str) -> User | None:
        found = await self._aside(lambda: os.stat(f"{self.directory}/{name}"))
        if found.st_uid == os.geteuid():
            return None
        return User(found.st_uid, found.st_gid, groups_of(found.st_uid, found.st_gid))

    async def room(self) -> Room:
        return await self._aside(self._room)

    def _room(self) -> Room:
        disk = os.statvfs(self.directory)
        used = 0
        for root in self._names():
            for above, _, names in os.walk(f"{self.directory}/{root}"):
                for name in names:
                    with suppress(OSError):
                        used += os.lstat(f"{above}/{name}").st_size
        return Room(used, disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)

    async def _aside(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, call)
        except OSError as error:
            raise StoreError(
                f"the spool {self.directory} cannot be used: {in_words(error, 'spool', self.directory)}"
            ) from error


_TAKEN = (errno.EAGAIN, errno.EACCES)
"""The errors of a lock that another process holds."""


def hold(directory: str) -> int:
    """Hold the spool at `directory` until this process ends, or closes the descriptor. UsageError if another daemon does."""
    try:
        descriptor = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"the spool {directory} cannot be used: its lock: {in_words(error, 'spool', directory)}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno not in _TAKEN:
            raise UsageError(
                f"the spool {directory} cannot be locked: {in_words(error, 'spool')}. A disk of the node itself has locks"
            ) from error
        raise UsageError(f"another daemon uses the spool {directory}: give each a directory of its own") from error
    return descriptor
