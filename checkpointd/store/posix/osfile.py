"""Writes one file through two descriptors: aligned parts with O_DIRECT from the caller's memory, the rest buffered.

Invariants
  OSFILE-1  A direct write covers whole blocks, and parts never overlap, so no page is written through both descriptors. Cache
      and disk never disagree, and one fsync of the buffered descriptor covers both.
  OSFILE-2  A descriptor is closed only when no call uses it. Otherwise the kernel could give its number to another file, and
      the call would write into that file.
  OSFILE-3  After a failed fsync the content counts as lost. A second fsync would report success, although pages were dropped.
  OSFILE-4  A large write has left the page cache when it returns, even if the file system refuses O_DIRECT. Otherwise `sync`
      would have to write the whole file, and nobody could tell how far a save has come.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, TypeAlias

from typing_extensions import Buffer

from checkpointd.store.posix.threads import Threads

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes: TypeAlias = npt.NDArray[np.uint8]

BLOCK_BYTES: Final = 4096
"""Offsets, lengths and addresses of direct writes are multiples of this. If a disk has larger blocks, writes are buffered."""

DIRECT_BYTES_MIN: Final = 64 * 1024
"""Smaller writes are faster through the page cache than by waiting for the disk."""

REFUSES_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_CANNOT_RESERVE: Final = frozenset({errno.EOPNOTSUPP, errno.ENOSYS})

_CANNOT_WRITE_BACK: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE})
_WRITE_BACK: Final = 1 | 2 | 4
"""SYNC_FILE_RANGE_WAIT_BEFORE, _WRITE and _WAIT_AFTER of sync_file_range(2)."""

# os.posix_fallocate does not fit: if the file system cannot reserve, glibc writes a byte to every block instead.
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class OsFile:
    """A new file open for writing; `checkpointd.store.posix.disk.WritableFile` is the contract."""

    def __init__(self, path: str, *, bulk: Threads, small: Threads, directory: int | None = None) -> None:
        """Create `path`, relative to `directory` if given; FileExistsError if the name is taken. Blocks."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC  # with O_EXCL, no link is followed
        self._buffered = os.open(path, flags, 0o666, dir_fd=directory)
        self._direct: int | None = None
        self._direct_refused = False
        self._guard = threading.Condition()
        self._calls = 0
        self._closed = self._lost = False
        self._bulk, self._small = bulk, small

    async def write_at(self, offset: int, data: Buffer) -> None:
        import numpy as np  # imported late: commands that write nothing start twice as fast without it

        part = np.frombuffer(memoryview(data), np.uint8)
        threads = self._bulk if part.size >= DIRECT_BYTES_MIN else self._small
        await threads.run(self._write, offset, part)

    async def reserve(self, size: int) -> None:
        await self._small.run(self._reserve, size)

    async def truncate(self, size: int) -> None:
        await self._small.run(self._truncate, size)

    async def sync(self) -> None:
        await self._small.run(self._sync)

    async def close(self) -> None:
        await self._small.run(self.close_now)

    def close_now(self) -> None:
        """Close the descriptors once no call uses them (OSFILE-2). Blocks."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._guard.wait_for(lambda: self._calls == 0)
        try:
            os.close(self._buffered)
        finally:
            if self._direct is not None:
                os.close(self._direct)

    @contextmanager
    def _in_use(self) -> Iterator[int]:
        """The buffered descriptor, kept open for the length of one call."""
        with self._guard:
            if self._closed:
                raise OSError(errno.EBADF, "the file is closed")
            self._calls += 1
        try:
            yield self._buffered
        finally:
            with self._guard:
                self._calls -= 1
                self._guard.notify_all()

    def _write(self, offset: int, part: Bytes) -> None:
        with self._in_use() as buffered:
            head, body = direct_part(offset, part)
            written = head
            direct = self._direct_descriptor() if body else None
            if direct is not None:
                written += self._write_direct(direct, offset + head, part[head : head + body])
            _write_all(buffered, offset, part[:head])
            _write_all(buffered, offset + written, part[written:])
            if part.size - written >= DIRECT_BYTES_MIN:
                self._write_back(buffered, offset + written, part.size - written)

    def _write_back(self, buffered: int, offset: int, nbytes: int) -> None:
        """Wait until a range has left the page cache (OSFILE-4); does nothing if the file system does not support that."""
        if _libc.sync_file_range(buffered, offset, nbytes, _WRITE_BACK) == 0:
            return
        number = ctypes.get_errno()
        if number not in _CANNOT_WRITE_BACK:
            self._lost = True  # the kernel reports the error once: fsync would succeed
            raise OSError(number, os.strerror(number))

    def _write_direct(self, direct: int, offset: int, body: Bytes) -> int:
        """Bytes written with O_DIRECT: fewer than all if the file system refuses it (then for good) or stops inside a block."""
        written = 0
        while written < body.size and written % BLOCK_BYTES == 0:
            try:
                written += os.pwrite(direct, body.data[written:], offset + written)
            except OSError as error:
                if error.errno not in REFUSES_DIRECT:
                    raise
                self._direct_refused = True
                break
        return written

    def _direct_descriptor(self) -> int | None:
        """The O_DIRECT descriptor of the same file, opened at first use; None if the file system refuses it."""
        with self._guard:
            if self._direct is None and not self._direct_refused:
                try:
                    # By descriptor, because the name may be gone, or another file may have it.
                    self._direct = os.open(f"/proc/self/fd/{self._buffered}", os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
                except OSError:
                    self._direct_refused = True
            return None if self._direct_refused else self._direct

    def _reserve(self, size: int) -> None:
        with self._in_use() as buffered:
            while size > 0 and _libc.fallocate(buffered, 0, 0, size) != 0:
                number = ctypes.get_errno()
                if number in _CANNOT_RESERVE:
                    return
                if number != errno.EINTR:
                    raise OSError(number, os.strerror(number))

    def _truncate(self, size: int) -> None:
        with self._in_use() as buffered:
            os.ftruncate(buffered, size)

    def _sync(self) -> None:
        with self._in_use() as buffered:
            if self._lost:
                raise OSError(errno.EIO, "an earlier fsync of this file failed; its content is lost")
            try:
                os.fsync(buffered)
            except OSError:
                self._lost = True
                raise


def direct_part(offset: int, part: Bytes) -> tuple[int, int]:
    """The run of whole blocks in `part` that O_DIRECT can write at `offset`: (bytes before it, bytes in it)."""
    address = int(part.__array_interface__["data"][0])
    if (address - offset) % BLOCK_BYTES:
        return 0, 0
    head = -offset % BLOCK_BYTES
    body = (part.size - head) // BLOCK_BYTES * BLOCK_BYTES
    return (head, body) if body >= DIRECT_BYTES_MIN else (0, 0)


def _write_all(descriptor: int, offset: int, part: Bytes) -> None:
    while part.size:
        written = os.pwrite(descriptor, part.data, offset)
        offset, part = offset + written, part[written:]
