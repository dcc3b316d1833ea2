"""A read-only disk: it refuses every call that would change something."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Never

from checkpointd.store.posix.disk import Child, Disk, FileStatus


class ReadOnlyDisk:
    """Reads from `disk` and refuses writes; `checkpointd.store.posix.disk.Disk` is the contract."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    @property
    def alignment(self) -> int:
        return self._disk.alignment

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        return await self._disk.read(path, size_max, past_cache=past_cache)

    async def read_each(self, paths: Sequence[str], size_max: int) -> list[bytes | OSError]:
        return await self._disk.read_each(paths, size_max)

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self._disk.read_at(path, offset, out, past_cache=past_cache)

    async def read_parts(self, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
        return await self._disk.read_parts(path, offset, parts, then)

    async def children(self, path: str, *, links: bool = False, sizes: bool = True) -> list[Child]:
        return await self._disk.children(path, links=links, sizes=sizes)

    async def size(self, path: str) -> int:
        return await self._disk.size(path)

    async def status(self, path: str) -> FileStatus:
        return await self._disk.status(path)

    async def status_each(self, paths: Sequence[str]) -> list[FileStatus]:
        return await self._disk.status_each(paths)

    async def _refused(self, *_: object, **__: object) -> Never:
        raise OSError(errno.EBADF, "this store was opened to be read, not to be written to")

    create = sync_file = sync_directory = make_directory = remove_directory = _refused
    link = rename = exchange = clone = protect = unlink = unlink_each = locked = _refused
