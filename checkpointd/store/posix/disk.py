"""The interface to the few file system calls of the POSIX store, so that a simulated disk can replace the real one.

Paths are absolute strings. Every call may fail with OSError; nothing here translates errors. What is durable: the content of
a file after `WritableFile.sync`, the names in a directory after `sync_directory`; nothing else. No call follows a symbolic
link: one on the way ends in ELOOP, and so does one in the place of a file or directory that is read, listed or synced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class Child:
    """One name in a directory; `size` in bytes, 0 for a directory and for a symbolic link that is listed as one."""

    name: str
    size: int
    is_directory: bool
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class FileStatus:
    """Of a file or directory: its inode number (two names with one number are one file), bytes, and time of change in ns.

    `device` is its file system; `touched_ns` when its inode changed, which nobody can set (0 where that is not known).
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
        """Reserve `size` bytes on the disk where the file system can; OSError ENOSPC where they are not there."""
        ...

    async def truncate(self, size: int) -> None: ...

    async def sync(self) -> None:
        """fsync: the content is durable; the file's name is not, until its directory is synced."""
        ...

    async def close(self) -> None: ...


class Disk(Protocol):
    """A file system."""

    @property
    def alignment(self) -> int:
        """Offsets, lengths and addresses that are multiples of this are written without a copy."""
        ...

    async def create(self, path: str) -> WritableFile:
        """Create a new file and open it; FileExistsError where the name is taken."""
        ...

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        """The content; OSError EFBIG where it is longer than `size_max`. `past_cache`: as the disk has it, if that can be."""
        ...

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        """Fill `out` from `offset`; the bytes read, fewer only at the end of the file. `past_cache`: as for `read`."""
        ...

    async def sync_file(self, path: str) -> None:
        """fsync an existing file by name."""
        ...

    async def sync_directory(self, path: str) -> None: ...

    async def make_directory(self, path: str) -> None:
        """mkdir; FileExistsError where the name is taken."""
        ...

    async def remove_directory(self, path: str) -> None:
        """rmdir."""
        ...

    async def link(self, source: str, target: str) -> None:
        """Hard link, of a symbolic link itself; FileExistsError where `target` exists. Atomic."""
        ...

    async def rename(self, source: str, target: str) -> None:
        """Atomic; replaces `target`, if that is a file. A directory goes where there is nothing."""
        ...

    async def exchange(self, one: str, other: str) -> bool:
        """Let two names change places, atomically; both exist, and may be directories. False where the file system cannot."""
        ...

    async def clone(self, source: str, target: str) -> bool:
        """Make the new file `target`, which shares the content of `source` until one of them is written to, and has its time of
        change. False, and no file, where the file system cannot. Durable after `sync_file`.
        """
        ...

    async def protect(self, path: str) -> None:
        """Let nobody open a file for writing, but for the superuser; its names can be removed as before."""
        ...

    async def unlink(self, path: str) -> None: ...

    async def status(self, path: str) -> FileStatus:
        """Where `path` is a symbolic link, of the link itself."""
        ...

    async def children(self, path: str, *, links: bool = False) -> list[Child]:
        """The names in a directory, unsorted. `links`: symbolic links are listed as such, wherever they lead; else left out."""
        ...

    async def size(self, path: str) -> int:
        """Size of a regular file; FileNotFoundError where there is none, IsADirectoryError for a directory."""
        ...

    async def locked(self, path: str) -> Lock:
        """An exclusive lock on the file `path` (created if need be), held until `Lock.release` or the holder's death."""
        ...


class Lock(Protocol):
    async def release(self) -> None: ...
