"""The real file system: aiofiles for names, own threads for bytes and fsync.

`checkpointd.store.disk` is the contract. Every call ends when its system call has ended, cancelled or not. Works under any
asyncio loop; all waiting is done without the GIL.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import stat

import aiofiles.os

from checkpointd.store.disk import Child, File, Lock, Status
from checkpointd.store.osfile import BLOCK_BYTES, REFUSES_DIRECT, OsFile
from checkpointd.store.threads import Threads, to_the_end
from checkpointd.waits import Waiting

BULK_THREADS = 4
SMALL_THREADS = 4
_LOCK_POLL_S_MIN, _LOCK_POLL_S_MAX = 0.001, 0.05


class OsDisk:
    """The file system of this machine. Bulk writes and reads never keep names, small files and fsyncs waiting for a thread."""

    def __init__(self, *, bulk_threads: int = BULK_THREADS) -> None:
        self._bulk = Threads(bulk_threads, "checkpointd-bulk")
        self._small = Threads(SMALL_THREADS, "checkpointd-disk")

    @property
    def alignment(self) -> int:
        return BLOCK_BYTES

    async def create(self, path: str) -> File:
        made: list[OsFile] = []
        try:
            await self._small.run(lambda: made.append(OsFile(path, bulk=self._bulk, small=self._small)))
        except asyncio.CancelledError:
            for file in made:
                file.close_now()
            raise
        return made[0]

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        if past_cache:
            content = await self._bulk.run(_read_past_cache, path, size_max)
        else:
            content = await self._small.run(_read, path, size_max)
        if content is None or len(content) > size_max:
            raise OSError(errno.EFBIG, f"longer than the {size_max} bytes that were asked for")
        return content

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self._bulk.run(_read_at_past_cache if past_cache else _read_at, path, offset, out)

    async def sync_file(self, path: str) -> None:
        await self._small.run(_sync, path, os.O_RDONLY)

    async def sync_directory(self, path: str) -> None:
        await self._small.run(_sync, path, os.O_RDONLY | os.O_DIRECTORY)

    async def make_directory(self, path: str) -> None:
        await to_the_end(aiofiles.os.mkdir(path, executor=self._small.executor))

    async def remove_directory(self, path: str) -> None:
        await to_the_end(aiofiles.os.rmdir(path, executor=self._small.executor))

    async def link(self, source: str, target: str) -> None:
        await self._small.run(_link, source, target)

    async def rename(self, source: str, target: str) -> None:
        await to_the_end(aiofiles.os.rename(source, target, executor=self._small.executor))

    async def exchange(self, one: str, other: str) -> bool:
        return await self._small.run(_exchange, one, other)

    async def clone(self, source: str, target: str) -> bool:
        return await self._small.run(_clone, source, target)

    async def protect(self, path: str) -> None:
        await self._small.run(_protect, path)

    async def unlink(self, path: str) -> None:
        await to_the_end(aiofiles.os.unlink(path, executor=self._small.executor))

    async def status(self, path: str, *, follow: bool = True) -> Status:
        found = await to_the_end(aiofiles.os.stat(path, follow_symlinks=follow, executor=self._small.executor))
        return Status(found.st_ino, found.st_size, found.st_mtime_ns, stat.S_ISLNK(found.st_mode))

    async def children(self, path: str, *, links: bool = False) -> list[Child]:
        return await self._small.run(_children, path, links)

    async def size(self, path: str) -> int:
        status = await to_the_end(aiofiles.os.stat(path, executor=self._small.executor))
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return status.st_size

    async def locked(self, path: str) -> Lock:
        lock = OsLock(path, self._small)
        try:
            await lock.acquire()
        except BaseException:
            await lock.release()
            raise
        return lock

    async def close(self) -> None:
        """Let the threads end. Calls in flight go on, new ones are refused."""
        self._bulk.close()
        self._small.close()


class OsLock:
    """flock on a file of its own descriptor: excludes other processes, and other holders in this one. A dead holder lets go."""

    def __init__(self, path: str, threads: Threads) -> None:
        self._path, self._threads = path, threads
        self._descriptor: int | None = None

    async def acquire(self) -> None:
        """Wait for the lock. By polling: a blocked call would keep a thread, perhaps the one that the holder needs."""
        await self._threads.run(self._open)
        pause_s = _LOCK_POLL_S_MIN
        waiting = Waiting(lambda: f"another process holds the lock {self._path}; `lslocks` shows which")
        while not await self._threads.run(self._try):
            waiting.look()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOCK_POLL_S_MAX)

    async def release(self) -> None:
        await self._threads.run(self._close)

    def _open(self) -> None:
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def _try(self) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            # Closing is not enough where a fork took the descriptor along.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _exchange(one: str, other: str) -> bool:
    """renameat2(2); NFS and others cannot."""
    if _libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
        return False
    raise OSError(code, os.strerror(code), one, None, other)


_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _read_at(path: str, offset: int, out: memoryview) -> int:
    descriptor = _open_to_read(path)
    try:
        return _fill(descriptor, offset, _as_bytes(out))
    finally:
        os.close(descriptor)


def _fill(descriptor: int, offset: int, part: memoryview) -> int:
    done = 0
    while done < part.nbytes:
        count = os.preadv(descriptor, [part[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _as_bytes(out: memoryview) -> memoryview:
    return out.cast("B") if out.nbytes else memoryview(b"")


def _read(path: str, size_max: int) -> bytes | None:
    """Up to a byte more than `size_max`; None where the file is longer, of which nothing is read then. In one go on one thread:
    whoever is cancelled in the middle leaves no open file behind.
    """
    with open(path, "rb", opener=_open_to_read) as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(size + 1) if size <= size_max else None


def _read_past_cache(path: str, size_max: int) -> bytes | None:
    """All of the file; None where it is longer than `size_max`."""
    size = os.stat(path).st_size
    if size > size_max:
        return None
    out = memoryview(bytearray(size))
    return bytes(out[: _read_at_past_cache(path, 0, out)])


def _read_at_past_cache(path: str, offset: int, out: memoryview) -> int:
    """As `_read_at`, but what the disk has: by O_DIRECT, or, where the file system refuses that, once the cache was dropped."""
    part = _as_bytes(out)
    try:
        descriptor = _open_to_read(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in REFUSES_DIRECT:
            raise
    else:
        try:
            return _fill_direct(descriptor, offset, part)
        except OSError as error:
            if error.errno not in REFUSES_DIRECT:
                raise
        finally:
            os.close(descriptor)
    descriptor = _open_to_read(path)
    try:
        # Before, to read from the disk; pages that are still to be written stay, but nothing is read so before it was synced.
        # And after: nobody asked for these pages, and others may be wanted.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        done = _fill(descriptor, offset, part)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return done
    finally:
        os.close(descriptor)


_BOUNCE_BYTES = 1 << 20


def _fill_direct(descriptor: int, offset: int, part: memoryview) -> int:
    """The same by way of a buffer of whole blocks: offset, length and address must be multiples of a block."""
    done = 0
    with mmap.mmap(-1, _BOUNCE_BYTES) as bounce, memoryview(bounce) as blocks:
        while done < part.nbytes:
            skip = (offset + done) % BLOCK_BYTES
            wanted = min(skip + part.nbytes - done, _BOUNCE_BYTES)
            count = os.preadv(descriptor, [blocks[: -(-wanted // BLOCK_BYTES) * BLOCK_BYTES]], offset + done - skip)
            taken = min(count, wanted) - skip
            if taken <= 0:
                break
            part[done : done + taken] = blocks[skip : skip + taken]
            done += taken
            if count % BLOCK_BYTES:
                break  # the end of the file
    return done


def _open_to_read(path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file or directory. O_NONBLOCK: opening a FIFO that nobody writes to would keep the thread for ever."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is neither a file nor a directory, but a pipe or a device: remove it", path)


def _sync(path: str, flags: int) -> None:
    descriptor = _open_to_read(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        # A file server that was asked twice (a lost answer, sent again) meets its own link.
        if not os.path.samefile(source, target):
            raise


def _clone(source: str, target: str) -> bool:
    """ioctl_ficlone(2)."""
    with open(source, "rb") as stored, open(target, "xb") as file:
        try:
            fcntl.ioctl(file.fileno(), _FICLONE, stored.fileno())
        except OSError as error:
            os.unlink(target)
            if error.errno in _CANNOT_CLONE:
                return False
            raise
        status = os.fstat(stored.fileno())
        os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return True


_FICLONE = 0x40049409
_CANNOT_CLONE = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EPERM})


def _protect(path: str) -> None:
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & _WRITE:
        os.chmod(path, mode & ~_WRITE)


_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def _children(path: str, links: bool) -> list[Child]:
    """What lies in `path`. No link to a directory is one: whoever clears it away would do it in somebody else's house."""
    found = []
    with os.scandir(path) as entries:
        for entry in entries:
            if links and entry.is_symlink():
                found.append(Child(entry.name, 0, is_directory=False, is_link=True))
                continue
            try:
                directory = entry.is_dir()
                if directory and entry.is_symlink():
                    continue
                found.append(Child(entry.name, 0 if directory else entry.stat().st_size, directory))
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ELOOP}:  # Removed since, or a link to nowhere.
                    raise
    return found
