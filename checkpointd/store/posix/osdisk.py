"""The real file system, called on own threads. Every call resolves its path anew, from an anchor, and follows no symbolic link.

`disk.py` is the contract; `anchor.py` resolves paths. A call ends only when its system call has ended, even if it is cancelled.
Works under any asyncio loop and waits without the GIL.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby, islice

from checkpointd.store.posix.anchor import Anchor, AnchoredName, LinkMet
from checkpointd.store.posix.disk import Child, FileStatus, Lock, WritableFile
from checkpointd.store.posix.osfile import BLOCK_BYTES, REFUSES_DIRECT, OsFile
from checkpointd.store.posix.threads import Threads
from checkpointd.store.posix.users import User
from checkpointd.waits import Waiting

BULK_THREADS = 4
SMALL_THREADS = 4
REMOVING_THREADS = 4
_LOCK_POLL_S_MIN, _LOCK_POLL_S_MAX = 0.001, 0.05


class OsDisk:
    """The file system of this machine. Large reads and writes, and removals of many files, have threads of their own, so small
    calls never wait for them.

    No symbolic link below the directory `anchor` is followed. With `user`, all calls have the rights of that user.
    """

    def __init__(self, anchor: str = "/", *, user: User | None = None, bulk_threads: int = BULK_THREADS) -> None:
        self._anchor = Anchor(anchor)
        self._bulk = Threads(bulk_threads, "checkpointd-bulk", user)
        self._small = Threads(SMALL_THREADS, "checkpointd-disk", user)
        self._removing = Threads(REMOVING_THREADS, "checkpointd-removing", user)

    @property
    def alignment(self) -> int:
        return BLOCK_BYTES

    async def create(self, path: str) -> WritableFile:
        made: list[OsFile] = []
        try:
            await self._small.run(lambda: made.append(self._create(path)))
        except asyncio.CancelledError:
            for file in made:
                file.close_now()
            raise
        return made[0]

    def _create(self, path: str) -> OsFile:
        with self._anchor.at(path) as place:
            return OsFile(place.name, directory=place.directory, bulk=self._bulk, small=self._small)

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        if past_cache:
            content = await self._bulk.run(_read_past_cache, self._anchor, path, size_max)
        else:
            content = await self._small.run(_read, self._anchor, path, size_max)
        return _bounded(content, size_max)

    async def read_each(self, paths: Sequence[str], size_max: int) -> list[bytes | OSError]:
        return await self._small.run(_read_each, self._anchor, paths, size_max)

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self._bulk.run(_read_at_past_cache if past_cache else _read_at, self._anchor, path, offset, out)

    async def read_parts(self, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
        return await self._bulk.run(_read_parts, self._anchor, path, offset, parts, then)

    async def sync_file(self, path: str) -> None:
        await self._small.run(_sync, self._anchor, path, 0)

    async def sync_directory(self, path: str) -> None:
        await self._small.run(_sync, self._anchor, path, os.O_DIRECTORY)

    async def make_directory(self, path: str) -> None:
        await self._small.run(_make_directory, self._anchor, path)

    async def remove_directory(self, path: str) -> None:
        await self._small.run(_remove_directory, self._anchor, path)

    async def link(self, source: str, target: str) -> None:
        await self._small.run(_link, self._anchor, source, target)

    async def rename(self, source: str, target: str) -> None:
        await self._small.run(_rename, self._anchor, source, target)

    async def exchange(self, one: str, other: str) -> bool:
        return await self._small.run(_exchange, self._anchor, one, other)

    async def clone(self, source: str, target: str) -> bool:
        return await self._small.run(_clone, self._anchor, source, target)

    async def protect(self, path: str) -> None:
        await self._small.run(_protect, self._anchor, path)

    async def unlink(self, path: str) -> None:
        await self._small.run(_unlink, self._anchor, path)

    async def unlink_each(self, paths: Sequence[str]) -> list[str]:
        return await self._removing.run(_unlink_each, self._anchor, paths)

    async def status(self, path: str) -> FileStatus:
        return await self._small.run(_status, self._anchor, path)

    async def status_each(self, paths: Sequence[str]) -> list[FileStatus]:
        return await self._small.run(lambda: [_status(self._anchor, path) for path in paths])

    async def children(self, path: str, *, links: bool = False, sizes: bool = True) -> list[Child]:
        return await self._small.run(_children, self._anchor, path, links, sizes)

    async def size(self, path: str) -> int:
        status = await self._small.run(_stat, self._anchor, path)
        if stat.S_ISLNK(status.st_mode):
            raise LinkMet(path)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return status.st_size

    async def locked(self, path: str) -> Lock:
        lock = OsLock(self._anchor, path, self._small)
        try:
            await lock.acquire()
        except BaseException:
            await lock.release()
            raise
        return lock

    async def close(self) -> None:
        """Let the threads end. Calls in flight go on; new calls are refused."""
        self._bulk.close()
        self._small.close()
        self._removing.close()


class OsLock:
    """flock on a file with a descriptor of its own. Excludes other processes and other holders in this process; ends with the
    holder's process.

    Users who may not write in the lock's directory cannot open the file at all: by locking it they would hold up every save.
    """

    def __init__(self, anchor: Anchor, path: str, threads: Threads) -> None:
        self._anchor, self._path, self._threads = anchor, path, threads
        self._descriptor: int | None = None

    async def acquire(self) -> None:
        """Wait for the lock, by polling: a blocked call would occupy a thread, perhaps the one that the holder needs."""
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
        with self._anchor.at(self._path) as place:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | place.flags
            self._descriptor = os.open(place.name, flags, 0o600, dir_fd=place.directory)
            above = os.path.dirname(self._path) if place.directory is None else place.directory
            _for_writers_alone(self._descriptor, os.stat(above))

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
            # Closing is not enough if a forked child has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _for_writers_alone(descriptor: int, above: os.stat_result) -> None:
    """Let only users who may write in the directory `above` open the lock, as far as this process may change the file.

    A lock that root made is given to the owner of that directory, whose saves need it.
    """
    found = os.fstat(descriptor)
    if found.st_nlink != 1:
        return  # the file has another name elsewhere, so its owner and mode must stay
    mode = stat.S_IRUSR | stat.S_IWUSR
    for may_write, both in ((stat.S_IWGRP, stat.S_IRGRP | stat.S_IWGRP), (stat.S_IWOTH, stat.S_IROTH | stat.S_IWOTH)):
        mode |= both if above.st_mode & may_write else 0
    with suppress(PermissionError):
        if found.st_uid == 0 != above.st_uid:
            os.fchown(descriptor, above.st_uid, -1)
    with suppress(PermissionError):
        if mode & stat.S_IRGRP and found.st_gid != above.st_gid:
            os.fchown(descriptor, -1, above.st_gid)
    with suppress(PermissionError):
        if stat.S_IMODE(found.st_mode) != mode:
            os.fchmod(descriptor, mode)


@contextmanager
def _both(anchor: Anchor, one: str, other: str) -> Iterator[tuple[AnchoredName, AnchoredName]]:
    with anchor.at(one) as first, anchor.at(other) as second:
        yield first, second


def _make_directory(anchor: Anchor, path: str) -> None:
    with anchor.at(path) as place:
        os.mkdir(place.name, dir_fd=place.directory)


def _remove_directory(anchor: Anchor, path: str) -> None:
    with anchor.at(path) as place:
        os.rmdir(place.name, dir_fd=place.directory)


def _unlink(anchor: Anchor, path: str) -> None:
    with anchor.at(path) as place:
        os.unlink(place.name, dir_fd=place.directory)


def _unlink_each(anchor: Anchor, paths: Sequence[str]) -> list[str]:
    """The path of each directory is resolved once, for the files that follow one another there."""
    left: list[str] = []
    for _, some in groupby(paths, os.path.dirname):
        of_directory = [*some]
        try:
            with anchor.at(of_directory[0]) as place:
                left += [path for path in of_directory if not _unlinked_beside(place, path)]
        except FileNotFoundError:
            continue
        except OSError:
            left += of_directory
    return left


def _unlinked_beside(place: AnchoredName, path: str) -> bool:
    """Whether the file `path`, in the directory of `place`, is gone now."""
    try:
        os.unlink(os.path.basename(path), dir_fd=place.directory)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _rename(anchor: Anchor, source: str, target: str) -> None:
    with _both(anchor, source, target) as (old, new):
        os.rename(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory)


def _stat(anchor: Anchor, path: str) -> os.stat_result:
    """The status of a link itself; only the anchor is followed."""
    with anchor.at(path) as place:
        return os.stat(place.name, dir_fd=place.directory, follow_symlinks=not place.flags)


def _status(anchor: Anchor, path: str) -> FileStatus:
    found = _stat(anchor, path)
    is_link = stat.S_ISLNK(found.st_mode)
    return FileStatus(found.st_ino, found.st_size, found.st_mtime_ns, is_link, found.st_dev, found.st_ctime_ns)


def _exchange(anchor: Anchor, one: str, other: str) -> bool:
    """renameat2(2); False if the file system cannot, such as NFS."""
    with _both(anchor, one, other) as (first, second):
        places = [(_AT_FDCWD if p.directory is None else p.directory, os.fsencode(p.name)) for p in (first, second)]
        if _libc.renameat2(*places[0], *places[1], _RENAME_EXCHANGE) == 0:
            return True
        code = ctypes.get_errno()
        if code in {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}:
            return False
        raise OSError(code, os.strerror(code), one, None, other)


_libc = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def _read_at(anchor: Anchor, path: str, offset: int, out: memoryview) -> int:
    with _opened(anchor, path) as descriptor:
        return _fill(descriptor, offset, [out])


def _read_parts(anchor: Anchor, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
    with _opened(anchor, path) as descriptor:
        count = _fill(descriptor, offset, parts)
    then(count)
    return count


def _fill(descriptor: int, offset: int, parts: Sequence[memoryview]) -> int:
    left = deque(part.cast("B") for part in parts if part.nbytes)
    done = 0
    while left:
        count = os.preadv(descriptor, list(islice(left, _PARTS_MAX)), offset + done)
        if not count:
            break
        done += count
        while left and count >= left[0].nbytes:
            count -= left.popleft().nbytes
        if count:
            left[0] = left[0][count:]
    return done


_PARTS_MAX = os.sysconf("SC_IOV_MAX")


def _as_bytes(out: memoryview) -> memoryview:
    return out.cast("B") if out.nbytes else memoryview(b"")


def _read(anchor: Anchor, path: str, size_max: int) -> bytes | None:
    """The content, with one byte too many if the file has grown beyond `size_max`; None if it was longer before the read.

    One call on one thread, so that a cancelled caller leaves no file open.
    """
    with _opened(anchor, path) as descriptor:
        return _content(descriptor, size_max)


def _bounded(content: bytes | None, size_max: int) -> bytes:
    if content is None or len(content) > size_max:
        raise OSError(errno.EFBIG, f"longer than the {size_max} bytes that were asked for")
    return content


def _content(descriptor: int, size_max: int) -> bytes | None:
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    size = status.st_size
    if size > size_max:
        return None
    data = os.read(descriptor, size + 1)
    while len(data) <= size and (more := os.read(descriptor, size + 1 - len(data))):
        data += more
    return data


def _read_each(anchor: Anchor, paths: Sequence[str], size_max: int) -> list[bytes | OSError]:
    """The path of each directory is resolved once, for the files that follow one another there."""
    found: list[bytes | OSError] = []
    for _, some in groupby(paths, os.path.dirname):
        of_directory = [*some]
        try:
            with anchor.at(of_directory[0]) as place:
                found += [_read_beside(place, path, size_max) for path in of_directory]
        except OSError as error:
            found += [error] * len(of_directory)
    return found


def _read_beside(place: AnchoredName, path: str, size_max: int) -> bytes | OSError:
    """The file `path` in the directory of `place`, or why it cannot be read."""
    try:
        with _opened_at(place, os.path.basename(path)) as descriptor:
            return _bounded(_content(descriptor, size_max), size_max)
    except OSError as error:
        return error


def _read_past_cache(anchor: Anchor, path: str, size_max: int) -> bytes | None:
    """The whole file; None if it is longer than `size_max`."""
    size = _stat(anchor, path).st_size
    if size > size_max:
        return None
    out = memoryview(bytearray(size))
    return bytes(out[: _read_at_past_cache(anchor, path, 0, out)])


def _read_at_past_cache(anchor: Anchor, path: str, offset: int, out: memoryview) -> int:
    """As `_read_at`, but from the disk itself: with O_DIRECT or, if the file system refuses it, after dropping the cache."""
    part = _as_bytes(out)
    try:
        with _opened(anchor, path, os.O_DIRECT) as descriptor:
            return _fill_direct(descriptor, offset, part)
    except OSError as error:
        if error.errno not in REFUSES_DIRECT:
            raise
    with _opened(anchor, path) as descriptor:
        # Dropped before, to read from the disk. Unwritten pages would stay, but objects are synced before they are read so.
        # Dropped again afterwards, because nobody needs these pages in the cache.
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        done = _fill(descriptor, offset, [part])
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        return done


_BOUNCE_BYTES = 1 << 20


def _fill_direct(descriptor: int, offset: int, part: memoryview) -> int:
    """As `_fill`, through a buffer of whole blocks, because offset, length and address must be multiples of a block."""
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


@contextmanager
def _opened(anchor: Anchor, path: str, flags: int = 0) -> Iterator[int]:
    """A descriptor to read a file or directory."""
    with anchor.at(path) as place, _opened_at(place, place.name, flags) as descriptor:
        yield descriptor


@contextmanager
def _opened_at(place: AnchoredName, name: str, flags: int = 0) -> Iterator[int]:
    """The same for `name` in the directory of `place`. O_NONBLOCK: to open a FIFO without a writer would block the thread for
    ever.
    """
    descriptor = os.open(name, flags | place.flags | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place.directory)
    try:
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is neither a file nor a directory, but a pipe or a device: remove it", name)
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(anchor: Anchor, path: str, flags: int) -> None:
    with _opened(anchor, path, flags) as descriptor:
        os.fsync(descriptor)


def _link(anchor: Anchor, source: str, target: str) -> None:
    with _both(anchor, source, target) as (old, new):
        try:
            os.link(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory, follow_symlinks=False)
        except FileExistsError:
            # If an answer was lost, the client asks the file server again, which then finds its own link.
            if not os.path.samestat(_stat(anchor, source), _stat(anchor, target)):
                raise


def _clone(anchor: Anchor, source: str, target: str) -> bool:
    """ioctl_ficlone(2)."""
    with _opened(anchor, source) as stored, anchor.at(target) as place:
        made = os.open(place.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=place.directory)
        with open(made, "wb"):
            try:
                fcntl.ioctl(made, _FICLONE, stored)
            except OSError as error:
                os.unlink(place.name, dir_fd=place.directory)
                if error.errno in _CANNOT_CLONE:
                    return False
                raise
            status = os.fstat(stored)
            os.utime(made, ns=(status.st_atime_ns, status.st_mtime_ns))
    return True


_FICLONE = 0x40049409
_CANNOT_CLONE = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EPERM})


def _protect(anchor: Anchor, path: str) -> None:
    with _opened(anchor, path) as descriptor:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & _WRITE:
            os.fchmod(descriptor, mode & ~_WRITE)


_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def _children(anchor: Anchor, path: str, links: bool, sizes: bool) -> list[Child]:
    """The names in `path`. No link counts as the directory that it leads to: to clear it away would delete files elsewhere."""
    found = []
    with _opened(anchor, path, os.O_DIRECTORY) as descriptor, os.scandir(descriptor) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found.append(Child(entry.name, 0, is_directory=True))
            elif not entry.is_symlink():
                with suppress(FileNotFoundError):  # removed since
                    size = entry.stat(follow_symlinks=False).st_size if sizes else 0
                    found.append(Child(entry.name, size, is_directory=False))
            elif links:
                found.append(Child(entry.name, 0, is_directory=False, is_link=True))
    return found
