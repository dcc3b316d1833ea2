"""One root on one disk, shared by the POSIX store and its writer. System errors become the contract's errors here."""

from __future__ import annotations

import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from checkpointd.errors import NotFoundError, UsageError
from checkpointd.other_formats import of_others
from checkpointd.store.names import LOCK, SERVICE, TEMPORARY
from checkpointd.store.posix.directories import Directories
from checkpointd.store.posix.disk import Child, Disk
from checkpointd.store.posix.failures import is_without_links, links_error, store_error, swept_error

_LEFT_MAX = 16
"""So many temporary files are tried again. The next start at the root removes any others (`sweep`)."""


class Root:
    """The directory `path` on `disk`; temporary files carry the name `writer`."""

    def __init__(self, path: str | os.PathLike[str], disk: Disk, writer: str) -> None:
        self.path = absolute(path)
        self.disk = disk
        self.directories = Directories(disk, self.path)
        self.writer = writer
        self._count = itertools.count()
        self._left: set[str] = set()
        """Temporary files that could not be removed, for instance since the file system had become read-only."""

    def guard(self, doing: str, key: str, *, reads: bool = False, needed: bool = False) -> Guard:
        """Turns system errors of a call into the store's. `reads`: the call changes nothing. `needed`: it needs the object."""
        return Guard(self, doing, key, reads, needed)

    def missing(self, key: str) -> NotFoundError:
        return NotFoundError(f"there is no object {key!r} in {self.path}")

    async def check(self, error: OSError) -> None:
        """Raise UsageError if the root, or a directory above it, is a file, as `error` may mean."""
        if not isinstance(error, NotADirectoryError):
            return
        try:
            await self.disk.size(self.path)
        except (FileNotFoundError, IsADirectoryError):
            return
        except NotADirectoryError:
            pass
        other = of_others(self.path)
        advice = f"give the path of a directory{'' if other is None else f'. {other}'}"
        raise UsageError(f"the root {self.path} is a file, or lies below one: {advice}") from error

    def temporary_path(self) -> str:
        """The path of a new temporary file."""
        return f"{self.path}/{TEMPORARY}/{self.writer}.{next(self._count)}"

    @asynccontextmanager
    async def temporary(self, data: bytes, *, durable: bool = True) -> AsyncIterator[str]:
        """A temporary file with the content `data`, synced if `durable`; removed at the end, unless it was renamed. If it
        cannot be removed, the next call tries again.
        """
        path = self.temporary_path()
        try:
            file = await self.directories.within(path, lambda: self.disk.create(path))
            try:
                await file.write_at(0, data)
                if durable:
                    await file.sync()
            finally:
                await file.close()
            yield path
        finally:
            for left in {path, *self._left}:
                await self._remove(left)

    async def _remove(self, temporary: str) -> None:
        try:
            await self.disk.unlink(temporary)
        except FileNotFoundError:
            pass
        except OSError:
            if len(self._left) < _LEFT_MAX:
                self._left.add(temporary)
            return
        self._left.discard(temporary)

    async def link(self, temporary: str, path: str, key: str, *, durable: bool = True) -> None:
        """Give the temporary file its name; FileExistsError if the name is taken."""
        try:
            await self._name(self.disk.link, temporary, path, key)
        except OSError as error:
            if is_without_links(error):
                raise links_error(error, key=key, url=self.path) from error
            raise
        if durable:
            await self.directories.sync_names(path)

    async def rename(self, temporary: str, path: str, key: str) -> None:
        """Give the temporary file its name, durably; replaces a file of that name."""
        await self._name(self.disk.rename, temporary, path, key)
        await self.directories.sync_names(path)

    async def settle(self, path: str) -> None:
        """Make a file durable that another process wrote: first the content, then the names."""
        await self.disk.size(path)  # raises for a directory, which `sync_file` would accept
        await self.disk.sync_file(path)
        await self.directories.sync_names(path)

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Hold the lock of this root, which keeps all other processes out."""
        path = f"{self.path}/{LOCK}"
        lock = await self.directories.within(path, lambda: self.disk.locked(path))
        try:
            yield
        finally:
            await lock.release()

    async def children(self, path: str, *, links: bool = False, sizes: bool = True) -> list[Child]:
        """The names in a directory; none if there is no such directory."""
        try:
            return await self.disk.children(path, links=links, sizes=sizes)
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


@dataclass(frozen=True, slots=True)
class Guard:
    """Turns system errors into StoreError, or into UnreadableError if the call only `reads` (STORE-6). If the object is
    `needed`, it raises NotFoundError if the name is not that of a file.
    """

    root: Root
    doing: str
    key: str
    reads: bool
    needed: bool

    async def __aenter__(self) -> None:
        """Nothing to prepare."""

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError):
            await self._raise(error)

    async def _raise(self, error: OSError) -> None:
        failure = error
        try:
            if isinstance(error, NotADirectoryError):
                await self.root.check(error)
            if self.needed and isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
                raise self.root.missing(self.key) from error
        except OSError as other:
            failure = other
        raise store_error(failure, doing=self.doing, key=self.key, url=self.root.path, reads=self.reads) from failure


def absolute(path: str | os.PathLike[str]) -> str:
    """The absolute path of the root; UsageError if `path` cannot be a root."""
    text = os.fspath(path)
    if not text or "\0" in text:
        raise UsageError(f"{text!r} is not a root: give the path of a directory")
    path = "/" + os.path.abspath(text).lstrip("/")  # abspath leaves two slashes at the beginning as they are
    if path in ("/", f"/{SERVICE}"):  # the second shows its checkpoints in "/"
        raise UsageError(
            f"{text!r} is the top of the whole file system: give checkpoints a directory of their own, such as /mnt/ckpts/run. "
            "Was a variable in the path empty?"
        )
    return path
