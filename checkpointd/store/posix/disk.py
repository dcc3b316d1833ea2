"""The interface to the few file system calls of the POSIX store, so that a simulated disk can replace the real one.

Paths are absolute strings. Every call may fail with OSError, which is not translated. Only two calls make anything durable:
`WritableFile.sync` the content of a file, and `sync_directory` the names in a directory. No call follows a symbolic link: a
link on the way raises ELOOP, and so does a link in the place of a file or directory that is read, listed or synced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from typing_extensions import Buffer


class Child(msgspec.Struct, frozen=True, gc=False):
    """One name in a directory; `size` in bytes, 0 for a directory or a symbolic link."""

    name: str
    size: int
    is_directory: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file or directory: its inode number (two names with one number are one file), bytes, and time of change in ns.

    `device`: its file system. `touched_ns`: when its inode changed, a time that nobody can set (0: not known).
    """

    number: int
    size: int
    changed_ns: int
    is_link: bool = False
    device: int = 0
    touched_ns: int = 0


class WritableFile(Protocol):
    """A file open for writing."""

    async def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`, past short writes."""
        ...

    async def reserve(self, size: int) -> None:
        """Reserve `size` bytes on the disk if the file system can; OSError ENOSPC if there is too little space."""
        ...

    async def truncate(self, size: int) -> None: ...

    async def sync(self) -> None:
        """fsync: makes the content durable. The file's name is durable only after its directory is synced."""
        ...

    async def close(self) -> None: ...


class Disk(Protocol):
    """A file system."""

    @property
    def alignment(self) -> int:
        """Writes are not copied if offset, length and address are multiples of this."""
        ...

    async def create(self, path: str) -> WritableFile:
        """Create a new file and open it; FileExistsError if the name is taken."""
        ...

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        """The content; OSError EFBIG if it is longer than `size_max`. `past_cache`: read from the disk itself, if possible."""
        ...

    async def read_each(self, paths: Sequence[str], size_max: int) -> list[bytes | OSError]:
        """The content of each file, or an error with the number of the one that `read` raises."""
        ...

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        """Fill `out` from `offset`. Returns the bytes read, fewer only at the end of the file. `past_cache`: as for `read`."""
        ...

    async def read_parts(self, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
        """Fill `parts` one after the other from `offset`. Returns the bytes read, as `read_at`.

        `then` is called with this number on the thread that has read.
        """
        ...

    async def sync_file(self, path: str) -> None:
        """fsync an existing file by name."""
        ...

    async def sync_directory(self, path: str) -> None: ...

    async def make_directory(self, path: str) -> None:
        """mkdir; FileExistsError if the name is taken."""
        ...

    async def remove_directory(self, path: str) -> None:
        """rmdir."""
        ...

    async def link(self, source: str, target: str) -> None:
        """Make a hard link, atomically; of a symbolic link, of the link itself. FileExistsError if `target` exists."""
        ...

    async def rename(self, source: str, target: str) -> None:
        """Rename atomically; a file replaces the file `target`. A directory needs a free name."""
        ...

    async def exchange(self, one: str, other: str) -> bool:
        """Exchange two existing names atomically; they may be directories. False if the file system cannot."""
        ...

    async def clone(self, source: str, target: str) -> bool:
        """Make the new file `target`, which shares the content of `source` until one of them is written to, with the same
        time of change. False, and no file, if the file system cannot. Durable after `sync_file`.
        """
        ...

    async def protect(self, path: str) -> None:
        """Make a file read-only for everybody except the superuser. Its names can still be removed."""
        ...

    async def unlink(self, path: str) -> None: ...

    async def unlink_each(self, paths: Sequence[str]) -> list[str]:
        """Unlink these files. Returns those that this call could not unlink, of which `unlink` says why; a missing one is none
        of them.
        """
        ...

    async def status(self, path: str) -> FileStatus:
        """The status of `path`; of a symbolic link, the link's own."""
        ...

    async def status_each(self, paths: Sequence[str]) -> list[FileStatus]:
        """The same for several, in one call."""
        ...

    async def children(self, path: str, *, links: bool = False, sizes: bool = True) -> list[Child]:
        """The names in a directory, unsorted. Symbolic links are listed, as links, only with `links`. Without `sizes`, all
        are 0, which saves a call for each name.
        """
        ...

    async def size(self, path: str) -> int:
        """Size of a regular file; FileNotFoundError if there is none, IsADirectoryError for a directory."""
        ...

    async def locked(self, path: str) -> Lock:
        """An exclusive lock on the file `path`, created if missing; held until `Lock.release` or the holder's death."""
        ...


class Lock(Protocol):
    async def release(self) -> None: ...
