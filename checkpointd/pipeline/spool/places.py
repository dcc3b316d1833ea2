"""Where a spool lies: a directory on this node's disk."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
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

log = logging.getLogger("checkpointd")
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


class Claim(Protocol):
    """A shard in the spool that this process alone uploads."""

    def release(self) -> None: ...


class Alone:
    """The claim of a process that holds the whole spool. It needs no descriptor: thousands of shards may wait in a daemon."""

    def release(self) -> None:
        """Do nothing: the spool is held until the process ends."""


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

    async def claim(self, name: str, key: str) -> Claim | None:
        """Claim the record `key` of the root `name` until this process ends. None if another process has it."""
        ...


def name_of(url: str, user: User | None) -> str:
    """The name of the root `url` in a spool: readable, and different for each root and user."""
    place, identity = (parse(url).place, parse(url).identity) if is_bucket_url(url) else (url, url)
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", place.rstrip("/").rpartition("://")[2]).strip("-")[-_READABLE_MAX:]
    whose = "" if user is None else f"-{user.uid}"
    return f"{readable or 'root'}{whose}-{digest(identity.encode())[:16]}"


@dataclass(slots=True)
class DiskPlace:
    """A spool on a disk. Its directory is made if it is missing. Each root has a directory below it that only the root's user
    may enter. UsageError if it cannot be used. `alone`: this process holds the spool alone, and needs no lock for each record.
    """

    directory: str
    alone: bool = False

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

    async def claim(self, name: str, key: str) -> Claim | None:
        if self.alone:
            return Alone()
        return await self._aside(lambda: FileClaim.of(f"{self.directory}/{name}/{key}"))

    async def _aside(self, call: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(None, call)
        except OSError as error:
            raise StoreError(
                f"the spool {self.directory} cannot be used: {in_words(error, 'spool', self.directory)}"
            ) from error


_TAKEN = (errno.EAGAIN, errno.EACCES)
"""The errors of a lock that another process holds."""
_HELD: set[int] = set()
"""The descriptors of all locks. A lock of the kernel lasts until every copy of its descriptor is closed."""


def _leave_to_parent() -> None:
    """In a forked child, such as a worker of a DataLoader, which may live longer than this process."""
    for descriptor in _HELD:
        with suppress(OSError):
            os.close(descriptor)
    _HELD.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


@dataclass(slots=True)
class FileClaim:
    """A lock of the kernel on a file, which ends with the process."""

    descriptor: int

    def __post_init__(self) -> None:
        _HELD.add(self.descriptor)

    @staticmethod
    def of(path: str) -> FileClaim | None:
        """The claim on the record at `path`; None if another process has it, or if it is gone."""
        try:
            claim = FileClaim(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(claim.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(claim.descriptor).st_nlink:  # else its holder has removed it just now
                return claim
        except OSError as error:
            if error.errno not in _TAKEN:
                claim.release()
                raise
        claim.release()
        return None

    def release(self) -> None:
        if self.descriptor in _HELD:  # in a forked child, the number may be that of another file by now
            _HELD.discard(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1


def hold(directory: str, *, alone: bool) -> FileClaim:
    """Hold the spool at `directory` until this process ends: `alone` as a daemon does, or with others, as trainers do.
    UsageError if others hold it in another way, or if it cannot be held.
    """
    try:
        claim = FileClaim(os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UsageError(f"the spool {directory} cannot be used: its lock: {in_words(error, 'spool', directory)}") from error
    try:
        fcntl.flock(claim.descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError as error:
        claim.release()
        if error.errno not in _TAKEN:
            raise UsageError(
                f"the spool {directory} cannot be locked: {in_words(error, 'spool')}. A disk of the node itself has locks"
            ) from error
        whose = "another daemon, or trainers without a sidecar," if alone else "a sidecar"
        raise UsageError(f"{whose} uses the spool {directory}: give each a directory of its own") from error
    return claim
