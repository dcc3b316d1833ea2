"""The directories of a POSIX store. They are made when needed, synced with their objects, and removed when empty.

Keeps invariants POSIX-2 to POSIX-4 of `checkpointd.store.posix.store`.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from checkpointd.store.names import PASSING, SERVICE
from checkpointd.store.posix.disk import Disk

T = TypeVar("T")
_RACES_MAX = 100
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})
_NOTHING_LOST = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESHUTDOWN, errno.EMFILE, errno.ENFILE, *_CANNOT_SYNC})
"""The errors of a sync that say nothing about the names: the directory went away, the store was closed, the directory could not
be opened since too many files are open, or the file system has no such call."""
_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOENT, errno.EROFS})


class DirectoryNotSynced(OSError):
    """The file system has no fsync for directories."""


class Directories:
    """Directories at and below `root` on `disk`."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self._root = disk, root
        self._service = f"{root}/{SERVICE}"
        self._made_above: set[str] = set()
        self._synced: set[str] = set()
        """Directories with durable names that no store removes."""
        self._seen: tuple[int, int] | None = None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._next: dict[str, asyncio.Task[None]] = {}
        """The syncs that have not begun, by directory."""
        self._failed: Counter[str] = Counter()
        """How many syncs of a directory have failed."""

    def forget_synced(self) -> None:
        """The root may have been removed and made again, so forget which names are durable, its own included."""
        # A new set, because a sync that began before still adds to the old one.
        self._synced = set()

    def seen(self, device: int, number: int) -> None:
        """The root is this directory now. If it was another one before, forget what was synced there."""
        if self._seen not in {None, (device, number)}:
            self.forget_synced()
        self._seen = (device, number)

    async def within(self, path: str, act: Callable[[], Awaitable[T]]) -> T:
        """Call `act`, which creates `path`. If a directory above is missing, make it and call `act` again."""
        for _ in range(_RACES_MAX):
            with suppress(FileNotFoundError):
                return await act()
            await self._make(os.path.dirname(path))
        return await act()

    async def sync(self, directory: str) -> None:
        """Make the names in `directory` durable. Callers that come while a sync of it runs share the next one (POSIX-4)."""
        if directory not in self._next:
            sync = asyncio.ensure_future(self._sync_after(directory, self._running.get(directory)))
            sync.add_done_callback(partial(self._synced_or_failed, directory))
            self._next[directory] = sync
        await asyncio.shield(self._next[directory])

    async def _sync_after(self, directory: str, running: asyncio.Task[None] | None) -> None:
        if running is not None:
            await asyncio.wait([running])
        self._running[directory] = self._next.pop(directory)
        failure = None if running is None or running.cancelled() else running.exception()
        if isinstance(failure, OSError) and failure.errno not in _NOTHING_LOST:
            raise OSError(failure.errno, failure.strerror, directory) from failure
        try:
            await self._disk.sync_directory(directory)
        except OSError as error:
            self._failed[directory] += error.errno not in _NOTHING_LOST
            if error.errno in _CANNOT_SYNC:
                raise DirectoryNotSynced(error.errno, error.strerror, directory) from error
            raise

    def _synced_or_failed(self, directory: str, sync: asyncio.Task[None]) -> None:
        for tasks in (self._running, self._next):
            if tasks.get(directory) is sync:
                del tasks[directory]
        if not sync.cancelled():
            sync.exception()  # taken, since all callers may have been cancelled

    async def sync_names(self, path: str) -> None:
        """Make every name durable from the root down to the file `path` (POSIX-2)."""
        directory = os.path.dirname(path)
        await self.sync(directory)
        while directory != self._root:
            await self._sync_name(directory)
            directory = os.path.dirname(directory)
        await self._sync_root()

    def failures(self, path: str) -> int:
        """How many syncs of the directories above `path`, up to the root, have failed.

        The kernel tells an error once. So if this has grown since `path` was created, a later sync may succeed although its
        name, or that of a directory above it, is lost.
        """
        count, directory = 0, os.path.dirname(path)
        while directory != self._root:
            count, directory = count + self._failed[directory], os.path.dirname(directory)
        return count + self._failed[directory]

    async def prune(self, path: str) -> None:
        """Remove the directories above `path` that are empty now, as far as possible (POSIX-3)."""
        directory = os.path.dirname(path)
        with suppress(OSError):
            while directory != self._root and not self._stays(directory):
                await self._disk.remove_directory(directory)
                directory = os.path.dirname(directory)

    def _stays(self, directory: str) -> bool:
        is_service = directory == self._service or directory.startswith(f"{self._service}/")
        return is_service and not directory.startswith(tuple(f"{self._root}/{name}/" for name in PASSING))

    async def _sync_name(self, directory: str) -> None:
        """Make the name of `directory` durable; once, if no store removes it."""
        synced = self._synced
        if directory in synced:
            return
        await self.sync(os.path.dirname(directory))
        if self._stays(directory):
            synced.add(directory)

    async def _sync_root(self) -> None:
        """Make the names of the root and all directories above durable, once: another process may just have made them."""
        synced = self._synced
        if self._root in synced:
            return
        directory = self._root
        while directory != "/":
            parent = os.path.dirname(directory)
            await self._sync_above(parent, made=directory in self._made_above)
            directory = parent
        synced.add(self._root)

    async def _sync_above(self, parent: str, *, made: bool) -> None:
        try:
            await self.sync(parent)
        except OSError as error:
            # This user cannot have changed a directory far above the root that it cannot open.
            if made or error.errno not in _NOT_OURS:
                raise

    async def _make(self, directory: str) -> None:
        """mkdir -p. If a directory vanishes meanwhile, the caller's next call fails."""
        try:
            await self._mkdir(directory)
        except FileNotFoundError:
            await self._make(os.path.dirname(directory))
            with suppress(FileNotFoundError):
                await self._mkdir(directory)

    async def _mkdir(self, directory: str) -> None:
        with suppress(FileExistsError):
            await self._disk.make_directory(directory)
            if not directory.startswith(f"{self._root}/"):
                self._made_above.add(directory)
