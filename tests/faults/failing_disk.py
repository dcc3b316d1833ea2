"""A disk on which the nth call fails, before or after its effect. It syncs nothing, since these tests cut no power."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, TypeVar

from typing_extensions import Buffer

from checkpointd.store.posix.disk import Child, FileStatus, Lock, WritableFile
from checkpointd.store.posix.osdisk import OsDisk

T = TypeVar("T")
When = Literal["before", "after"]


class FailingDisk:
    """Passes every call on; call number `fails` (from 0) raises EIO, `before` or `after` it was passed on."""

    def __init__(self, inner: OsDisk, *, fails: int | None = None, when: When = "before") -> None:
        self._inner, self._fails, self._when = inner, fails, when
        self.calls = 0
        self.failed: str | None = None
        """The call that failed, in words."""

    @property
    def alignment(self) -> int:
        return self._inner.alignment

    async def call(self, name: str, path: str, act: Callable[[], Awaitable[T]]) -> T:
        """Do `act`, or fail, as it is this call's turn."""
        number = self.calls
        self.calls += 1
        if number != self._fails:
            return await act()
        self.failed = f"{name} {path}"
        if self._when == "after":
            await act()
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    async def create(self, path: str) -> WritableFile:
        return await self.call("create", path, lambda: self._create(path))

    async def _create(self, path: str) -> WritableFile:
        return FailingFile(self, path, await self._inner.create(path))

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        return await self.call("read", path, lambda: self._inner.read(path, size_max, past_cache=past_cache))

    async def read_each(self, paths: Sequence[str], size_max: int) -> list[bytes | None]:
        found: list[bytes | None] = []
        for path in paths:
            try:
                found.append(await self.read(path, size_max))
            except OSError:
                found.append(None)
        return found

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self.call("read_at", path, lambda: self._inner.read_at(path, offset, out, past_cache=past_cache))

    async def read_parts(self, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
        return await self.call("read_parts", path, lambda: self._inner.read_parts(path, offset, parts, then))

    async def sync_file(self, path: str) -> None:
        await self.call("sync_file", path, nothing)

    async def sync_directory(self, path: str) -> None:
        # Of a directory that is not there the system says so.
        await self.call("sync_directory", path, lambda: self._inner.children(path))

    async def make_directory(self, path: str) -> None:
        await self.call("make_directory", path, lambda: self._inner.make_directory(path))

    async def remove_directory(self, path: str) -> None:
        await self.call("remove_directory", path, lambda: self._inner.remove_directory(path))

    async def link(self, source: str, target: str) -> None:
        await self.call("link", target, lambda: self._inner.link(source, target))

    async def rename(self, source: str, target: str) -> None:
        await self.call("rename", target, lambda: self._inner.rename(source, target))

    async def exchange(self, one: str, other: str) -> bool:
        return await self.call("exchange", other, lambda: self._inner.exchange(one, other))

    async def clone(self, source: str, target: str) -> bool:
        return await self.call("clone", target, lambda: self._inner.clone(source, target))

    async def protect(self, path: str) -> None:
        await self.call("protect", path, lambda: self._inner.protect(path))

    async def status(self, path: str) -> FileStatus:
        return await self.call("status", path, lambda: self._inner.status(path))

    async def unlink_each(self, paths: Sequence[str]) -> list[str]:
        left: list[str] = []
        for path in paths:
            try:
                await self.unlink(path)
            except FileNotFoundError:
                continue
            except OSError:
                left.append(path)
        return left

    async def unlink(self, path: str) -> None:
        await self.call("unlink", path, lambda: self._inner.unlink(path))

    async def children(self, path: str, *, links: bool = False) -> list[Child]:
        return await self.call("children", path, lambda: self._inner.children(path, links=links))

    async def size(self, path: str) -> int:
        return await self.call("size", path, lambda: self._inner.size(path))

    async def locked(self, path: str) -> Lock:
        await self.call("locked", path, nothing)  # whoever cannot have the lock does not hold it
        return await self._inner.locked(path)


async def nothing() -> None:
    """An fsync where no power is cut."""


class FailingFile:
    """A file on a FailingDisk; its calls count with the disk's."""

    def __init__(self, disk: FailingDisk, path: str, inner: WritableFile) -> None:
        self._disk, self._path, self._inner = disk, path, inner

    async def write_at(self, offset: int, data: Buffer) -> None:
        await self._disk.call("write_at", self._path, lambda: self._inner.write_at(offset, data))

    async def reserve(self, size: int) -> None:
        await self._disk.call("reserve", self._path, lambda: self._inner.reserve(size))

    async def truncate(self, size: int) -> None:
        await self._disk.call("truncate", self._path, lambda: self._inner.truncate(size))

    async def sync(self) -> None:
        await self._disk.call("sync", self._path, nothing)

    async def close(self) -> None:
        await self._inner.close()
