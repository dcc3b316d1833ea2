"""A read-only disk: it refuses every call that would change something."""

from __future__ import annotations

import errno
from typing import Never

from checkpointd.store.posix.disk import Child, Disk, FileStatus, Lock, WritableFile


class ReadOnlyDisk:
    """Reads from `disk` and refuses writes; `checkpointd.store.posix.disk.Disk` is the contract."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def alignment(self) -> int:
        return self._disk.alignment

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        return await self._disk.read(path, size_max, past_cache=past_cache)

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self._disk.read_at(path, offset, out, past_cache=past_cache)

    async def children(self, path: str, *, links: bool = False) -> list[Child]:
        return await self._disk.children(path, links=links)

    async def size(self, path: str) -> int:
        return await self._disk.size(path)

    async def status(self, path: str) -> FileStatus:
        return await self._disk.status(path)

    async def create(self, path: str) -> WritableFile:
        _refuse(path)

    async def sync_file(self, path: str) -> None:
        _refuse(path)

    async def sync_directory(self, path: str) -> None:
        _refuse(path)

    async def make_directory(self, path: str) -> None:
        _refuse(path)

    async def remove_directory(self, path: str) -> None:
        _refuse(path)

    async def link(self, source: str, target: str) -> None:  # the contract's
        _refuse(target)

    async def rename(self, source: str, target: str) -> None:  # the contract's
        _refuse(target)

    async def exchange(self, one: str, other: str) -> bool:  # the contract's
        _refuse(one)

    async def clone(self, source: str, target: str) -> bool:
        _refuse(target)

    async def protect(self, path: str) -> None:
        _refuse(path)

    async def unlink(self, path: str) -> None:
        _refuse(path)

    async def locked(self, path: str) -> Lock:
        _refuse(path)


def _refuse(path: str) -> Never:
    raise OSError(errno.EBADF, "this store was opened to be read, not to be written to", path)
