"""What the POSIX store and its writer share: one root on one disk, where system errors become the contract's errors."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from checkpointd.errors import NotFoundError, UsageError
from checkpointd.store.names import LOCK, TEMPORARY
from checkpointd.store.posix.directories import Directories
from checkpointd.store.posix.disk import Child, Disk
from checkpointd.store.posix.failures import is_without_links, links_error, store_error, swept_error


class Root:
    """The directory `path` on `disk`; temporary files carry the name `writer`."""

    def __init__(self, path: str | os.PathLike[str], disk: Disk, writer: str) -> None:
        self.path = absolute(path)
        self.disk = disk
        self.directories = Directories(disk, self.path)
        self.writer = writer
        self._count = itertools.count()

    @asynccontextmanager
    async def guard(self, doing: str, key: str, *, reads: bool = False) -> AsyncIterator[None]:
        """Turn system errors into StoreError, and into UnreadableError where the call only `reads` (STORE-6)."""
        try:
            yield
        except OSError as error:
            if isinstance(error, NotADirectoryError):
                await self.check(error)
            raise store_error(error, doing=doing, key=key, url=self.path, reads=reads) from error

    @asynccontextmanager
    async def must_exist(self, key: str) -> AsyncIterator[None]:
        """Turn the errors of a name that is no file into NotFoundError."""
        try:
            yield
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            await self.check(error)
            raise NotFoundError(f"there is no object {key!r} in {self.path}") from error

    async def check(self, error: OSError) -> None:
        """Raise UsageError where the root, or something above it, is a file."""
        try:
            await self.disk.size(self.path)
        except (FileNotFoundError, IsADirectoryError):
            return
        except NotADirectoryError:
            pass
        raise UsageError(f"the root {self.path} is a file, or lies below one: give the path of a directory") from error

    @asynccontextmanager
    async def temporary(self, data: bytes) -> AsyncIterator[str]:
        """A synced temporary file that holds `data`; what is left of it goes at the end."""
        path = f"{self.path}/{TEMPORARY}/{self.writer}.{next(self._count)}"
        try:
            file = await self.directories.within(path, lambda: self.disk.create(path))
            try:
                await file.write_at(0, data)
                await file.sync()
            finally:
                await file.close()
            yield path
        finally:
            with suppress(OSError):
                await self.disk.unlink(path)

    async def link(self, temporary: str, path: str, key: str) -> None:
        """Give the temporary file its name, durably; FileExistsError where the name is taken."""
        try:
            await self._name(self.disk.link, temporary, path, key)
        except OSError as error:
            if is_without_links(error):
                raise links_error(error, key=key, url=self.path) from error
            raise
        await self.directories.sync_names(path)

    async def rename(self, temporary: str, path: str, key: str) -> None:
        """Give the temporary file its name, durably, instead of what has that name."""
        await self._name(self.disk.rename, temporary, path, key)
        await self.directories.sync_names(path)

    async def settle(self, path: str) -> None:
        """Make durable what another process may have left half-way: the content, then the names."""
        await self.disk.size(path)  # Refuses a directory, which could be synced as well.
        await self.disk.sync_file(path)
        await self.directories.sync_names(path)

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the lock of this root against all processes."""
        path = f"{self.path}/{LOCK}"
        lock = await self.directories.within(path, lambda: self.disk.locked(path))
        try:
            yield
        finally:
            await lock.release()

    async def children(self, path: str, *, links: bool = False) -> list[Child]:
        """The names in a directory; none where there is no such directory."""
        try:
            return await self.disk.children(path, links=links)
        except (FileNotFoundError, NotADirectoryError) as error:
            await self.check(error)
            return []

    async def _name(self, by: Callable[[str, str], Awaitable[None]], temporary: str, path: str, key: str) -> None:
        async def act() -> None:
            try:
                await by(temporary, path)
            except FileNotFoundError:
                await self._check_not_swept(temporary, key)
                raise

        await self.directories.within(path, act)

    async def _check_not_swept(self, temporary: str, key: str) -> None:
        try:
            await self.disk.size(temporary)
        except FileNotFoundError as error:
            raise swept_error(key=key, url=self.path) from error


def absolute(path: str | os.PathLike[str]) -> str:
    """The root `path` as the store calls it; UsageError where it cannot be one."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a root: give the path of a directory")
    return os.path.abspath(text)
