"""The real file system, in own threads: every call resolves its path anew, from an anchor, through no symbolic link.

`disk.py` is the contract, `anchor.py` says what a path may lead through. Every call ends when its
system call has ended, cancelled or not. Works under any asyncio loop; all waiting is done without the GIL.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from checkpointd.store.posix.anchor import Anchor, AnchoredName, LinkMet
from checkpointd.store.posix.disk import Child, FileStatus, Lock, WritableFile
from checkpointd.store.posix.osfile import BLOCK_BYTES, REFUSES_DIRECT, OsFile
from checkpointd.store.posix.threads import Threads
from checkpointd.store.posix.users import User
from checkpointd.waits import Waiting

BULK_THREADS = 4
SMALL_THREADS = 4
_LOCK_POLL_S_MIN, _LOCK_POLL_S_MAX = 0.001, 0.05


class OsDisk:
    """The file system of this machine. Bulk writes and reads never keep names, small files and fsyncs waiting for a thread.

    Below the directory `anchor` nothing is reached through a symbolic link. With `user`, the rights are those of that user.
    """

    def __init__(self, anchor: str = "/", *, user: User | None = None, bulk_threads: int = BULK_THREADS) -> None:
        self._anchor = Anchor(anchor)
        self._bulk = Threads(bulk_threads, "checkpointd-bulk", user)
        self._small = Threads(SMALL_THREADS, "checkpointd-disk", user)

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
        if content is None or len(content) > size_max:
            raise OSError(errno.EFBIG, f"longer than the {size_max} bytes that were asked for")
        return content

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self._bulk.run(_read_at_past_cache if past_cache else _read_at, self._anchor, path, offset, out)

    async def sync_file(self, path: str) -> None:
        await self._small.run(_sync, self._anchor, path, os.O_RDONLY)

    async def sync_directory(self, path: str) -> None:
        await self._small.run(_sync, self._anchor, path, os.O_RDONLY | os.O_DIRECTORY)

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

    async def status(self, path: str) -> FileStatus:
        found = await self._small.run(_stat, self._anchor, path)
        is_link = stat.S_ISLNK(found.st_mode)
        return FileStatus(found.st_ino, found.st_size, found.st_mtime_ns, is_link, found.st_dev, found.st_ctime_ns)

    async def children(self, path: str, *, links: bool = False) -> list[Child]:
        return await self._small.run(_children, self._anchor, path, links)

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
        """Let the threads end. Calls in flight go on, new ones are refused."""
        self._bulk.close()
        self._small.close()


class OsLock:
    """flock on a file of its own descriptor: excludes other processes, and other holders in this one. A dead holder lets go.

    Who may not write in its directory cannot open the file, even to read: a lock on it would hold up every save.
    """

    def __init__(self, anchor: Anchor, path: str, threads: Threads) -> None:
        self._anchor, self._path, self._threads = anchor, path, threads
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
            # Closing is not enough where a fork took the descriptor along.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)


def _for_writers_alone(descriptor: int, above: os.stat_result) -> None:
    """Let those open the lock who may write in the directory `above`, and nobody else, as far as the file is ours to change.

    One that root has made belongs to the owner of that directory, whose saves need it.
    """
    found = os.fstat(descriptor)
    if found.st_nlink != 1:
        return  # it is a file somewhere else, too, whose owner and mode are not ours to change
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


def _rename(anchor: Anchor, source: str, target: str) -> None:
    with _both(anchor, source, target) as (old, new):
        os.rename(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory)


def _stat(anchor: Anchor, path: str) -> os.stat_result:
    """Of a link itself; of what the anchor leads to, where that is one."""
    with anchor.at(path) as place:
        return os.stat(place.name, dir_fd=place.directory, follow_symlinks=not place.flags)


def _exchange(anchor: Anchor, one: str, other: str) -> bool:
    """renameat2(2); NFS and others cannot."""
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
    descriptor = _open_to_read(anchor, path)
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


def _read(anchor: Anchor, path: str, size_max: int) -> bytes | None:
    """Up to a byte more than `size_max`; None where the file is longer, of which nothing is read then. In one go on one thread:
    whoever is cancelled in the middle leaves no open file behind.
    """
    with open(_open_to_read(anchor, path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        return file.read(size + 1) if size <= size_max else None


def _read_past_cache(anchor: Anchor, path: str, size_max: int) -> bytes | None:
    """All of the file; None where it is longer than `size_max`."""
    size = _stat(anchor, path).st_size
    if size > size_max:
        return None
    out = memoryview(bytearray(size))
    return bytes(out[: _read_at_past_cache(anchor, path, 0, out)])


def _read_at_past_cache(anchor: Anchor, path: str, offset: int, out: memoryview) -> int:
    """As `_read_at`, but what the disk has: by O_DIRECT, or, where the file system refuses that, once the cache was dropped."""
    part = _as_bytes(out)
    try:
        descriptor = _open_to_read(anchor, path, os.O_RDONLY | os.O_DIRECT)
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
    descriptor = _open_to_read(anchor, path)
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


def _open_to_read(anchor: Anchor, path: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file or directory. O_NONBLOCK: opening a FIFO that nobody writes to would keep the thread for ever."""
    with anchor.at(path) as place:
        descriptor = os.open(place.name, flags | place.flags | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=place.directory)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is neither a file nor a directory, but a pipe or a device: remove it", path)


def _sync(anchor: Anchor, path: str, flags: int) -> None:
    descriptor = _open_to_read(anchor, path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _link(anchor: Anchor, source: str, target: str) -> None:
    with _both(anchor, source, target) as (old, new):
        try:
            os.link(old.name, new.name, src_dir_fd=old.directory, dst_dir_fd=new.directory, follow_symlinks=False)
        except FileExistsError:
            # A file server that was asked twice (a lost answer, sent again) meets its own link.
            if not os.path.samestat(_stat(anchor, source), _stat(anchor, target)):
                raise


def _clone(anchor: Anchor, source: str, target: str) -> bool:
    """ioctl_ficlone(2)."""
    with open(_open_to_read(anchor, source), "rb") as stored, anchor.at(target) as place:
        made = os.open(place.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666, dir_fd=place.directory)
        with open(made, "wb") as file:
            try:
                fcntl.ioctl(file.fileno(), _FICLONE, stored.fileno())
            except OSError as error:
                os.unlink(place.name, dir_fd=place.directory)
                if error.errno in _CANNOT_CLONE:
                    return False
                raise
            status = os.fstat(stored.fileno())
            os.utime(file.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
    return True


_FICLONE = 0x40049409
_CANNOT_CLONE = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.EPERM})


def _protect(anchor: Anchor, path: str) -> None:
    descriptor = _open_to_read(anchor, path)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if mode & _WRITE:
            os.fchmod(descriptor, mode & ~_WRITE)
    finally:
        os.close(descriptor)


_WRITE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def _children(anchor: Anchor, path: str, links: bool) -> list[Child]:
    """What lies in `path`. No symbolic link is what it leads to: whoever clears that away would do it in another house."""
    descriptor, found = _open_to_read(anchor, path, os.O_RDONLY | os.O_DIRECTORY), []
    try:
        with os.scandir(descriptor) as entries:
            for entry in entries:
                if entry.is_symlink():
                    if links:
                        found.append(Child(entry.name, 0, is_directory=False, is_link=True))
                    continue
                with suppress(FileNotFoundError):  # removed since
                    directory = entry.is_dir(follow_symlinks=False)
                    size = 0 if directory else entry.stat(follow_symlinks=False).st_size
                    found.append(Child(entry.name, size, directory))
    finally:
        os.close(descriptor)
    return found
