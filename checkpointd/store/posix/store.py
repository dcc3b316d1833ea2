"""The store on a POSIX file system: local disks, NFS, Lustre, GPFS.

Layout: an object is the file `<root>/<key>`; `<root>/.checkpointd/tmp/` holds objects on their way to a name, and
`<root>/.checkpointd/lock` is the lock of `put_if_match`.

Invariants (beside the contract's, `checkpointd.store.base`)
  POSIX-1  A small object is synced before link or rename gives it its name, so the name never shows torn bytes. An object that
      need not be durable is not synced.
  POSIX-2  When a call returns, it has synced every name from the root down to its object, after the object got its name.
      Earlier syncs do not count, because another process may have removed and remade an empty directory in between. The
      exception are directories that no store ever removes (the root's own path, `.checkpointd` and below, except below
      `shown` there): they are synced once. A person may still remove them; then `forget_synced`, or `identity` when
      it sees another root, makes them count as unsynced again.
  POSIX-3  Directories are removed only by rmdir, which fails unless they are empty. If a writer's directory vanishes before its
      object is in it, the writer makes the directory again.
  POSIX-4  Calls that need the same directory synced at the same time share one fsync, but only one that begins after each of
      them has changed its names.
"""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from operator import attrgetter
from typing import TypeVar

from typing_extensions import Buffer

from checkpointd.errors import CheckpointdError, ClosedError, DamagedError, LinkError, StoreError
from checkpointd.store import writers
from checkpointd.store.base import SMALL_BYTES_MAX, Capabilities, Entry, ObjectWriter, Store, each
from checkpointd.store.identity import Identity
from checkpointd.store.names import LOG, SERVICE, TEMPORARY, check_key, is_key
from checkpointd.store.posix.disk import Disk, WritableFile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.plain import PlainFiles, can_show
from checkpointd.store.posix.readonly import ReadOnlyDisk
from checkpointd.store.posix.rooted import Root, absolute
from checkpointd.store.posix.users import User

T = TypeVar("T")

_RACES_MAX = 100
BATCH = 64
"""The number of small files that one call to a thread reads or removes."""
CALLS = 4
"""The number of these calls at once."""
"""How long a sweep of directories may take, with the wait for the lock."""


class PosixStore(Store):
    """Objects as files below `root`, which is made at the first write; a root that is a file raises UsageError.

    With `read_only`, every call that would change the file system raises a StoreError. No symbolic link below `anchor` is
    followed; the default anchor is the directory that contains everything the store writes. With `user`, all calls have the
    rights of that user. `writer` names this process in its temporary files, and `is_alive` tells `sweep` which writers still
    run; simulations replace both.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        disk: Disk | None = None,
        *,
        read_only: bool = False,
        anchor: str | None = None,
        user: User | None = None,
        writer: str | None = None,
        is_alive: Callable[[str], bool] = writers.is_alive,
    ) -> None:
        self._own_disk: OsDisk | None = None
        if disk is None:
            path = absolute(root)
            top = os.path.dirname(path) if can_show(path) else path
            disk = self._own_disk = OsDisk(top if anchor is None else anchor, user=user)
        self._disk = disk = ReadOnlyDisk(disk) if read_only else disk
        self._root = Root(root, disk, writer or writers.new_writer())
        self._is_alive = is_alive
        self._plain = PlainFiles(self._root) if can_show(self._root.path) else None
        self._past_cache = False
        self._closed = False

    @property
    def url(self) -> str:
        return self._root.path

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(alignment=self._disk.alignment, shared=True)

    @property
    def plain_files(self) -> PlainFiles | None:
        return self._plain

    @property
    def uncached(self) -> PosixStore:
        view = copy.copy(self)
        view._own_disk, view._past_cache = None, True
        return view

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        path = self._path(key)
        async with self._root.guard("creating", key), self._root.temporary(data, durable=durable) as temporary:
            for _ in range(_RACES_MAX):
                with suppress(FileExistsError):
                    await self._root.link(temporary, path, key, durable=durable)
                    return True
                if not durable:
                    return False
                # The loser may act on the winner's object, too, so make it durable (STORE-1). If it is gone, try again.
                with suppress(FileNotFoundError):
                    await self._root.settle(path)
                    return False
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    async def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        async with self._root.guard("replacing", key), self._root.temporary(data) as temporary:
            await self._root.rename(temporary, path, key)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        path = self._path(key)
        async with self._root.guard("replacing", key), self._root.locked():
            if expected is None:
                # By link nevertheless, which is also safe against writers that take no lock.
                with suppress(LinkError):
                    return await self.put_if_absent(key, data)
                await self.put(key, data)
                return True
            if not await self._holds(path, expected):
                return False
            await self.put(key, data)
            return True

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        path = self._path(key)
        async with self._root.guard("creating", key):
            failures = self._root.directories.failures(path)
            file = await self._root.directories.within(path, lambda: self._disk.create(path))
        return await _reserved(PosixWriter(self._root, key, path, file, failures), size_hint)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        path, temporary = self._path(key), self._root.temporary_path()
        async with self._root.guard("replacing", key):
            file = await self._root.directories.within(temporary, lambda: self._disk.create(temporary))
        return await _reserved(PosixReplacement(self._root, key, path, file, temporary), size_hint)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        path = self._path(key)
        async with self._root.guard("reading", key, reads=True, needed=True):
            try:
                return await self._disk.read(path, size_max, past_cache=self._past_cache)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                raise DamagedError(f"{key!r} in {self.url} is larger than the {size_max} bytes allowed", key=key) from error

    async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
        if self._past_cache:
            return await super().get_each(keys, size_max=size_max)

        async def read(some: Sequence[str]) -> list[bytes | CheckpointdError | None]:
            paths = [self._path(key) for key in some]
            async with self._root.guard("reading", some[0], reads=True):
                got = await self._disk.read_each(paths, size_max)
            return [self._got(key, one) for key, one in zip(some, got, strict=True)]

        found = [one for some in await each(read, _batches(keys), CALLS) for one in some]
        unread = [key for key, one in zip(keys, found, strict=True) if one is None]
        others = iter(await super().get_each(unread, size_max=size_max) if unread else [])
        return [next(others) if one is None else one for one in found]

    def _got(self, key: str, one: bytes | OSError) -> bytes | CheckpointdError | None:
        """What `get_each` gives for an object; None if `get` must tell."""
        if isinstance(one, FileNotFoundError):
            return self._root.missing(key)
        return None if isinstance(one, OSError) else one

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        path = self._path(key)
        async with self._root.guard("reading", key, reads=True, needed=True):
            count = await self._disk.read_at(path, offset, out, past_cache=self._past_cache)
        self._check_size(key, offset, count, out.nbytes)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        if self._past_cache:
            return await super().get_parts(key, offset, parts, then)
        path, wanted = self._path(key), sum(part.nbytes for part in parts)
        # Its errors are its own, and not those of the storage.
        result: Future[T] = Future()

        def follow(count: int) -> None:
            if count == wanted:
                try:
                    result.set_result(then())
                except Exception as error:
                    result.set_exception(error)

        async with self._root.guard("reading", key, reads=True, needed=True):
            count = await self._disk.read_parts(path, offset, parts, follow)
        self._check_size(key, offset, count, wanted)
        return result.result(timeout=0)

    def _check_size(self, key: str, offset: int, count: int, wanted: int) -> None:
        if count < wanted:
            end = offset + wanted
            raise DamagedError(f"{key!r} in {self.url} ends before byte {end}: {count} of {wanted} bytes read", key=key)

    async def list(self, prefix: str) -> list[Entry]:
        path = self._path(prefix) if prefix else self._open().path
        async with self._root.guard("listing", prefix, reads=True):
            children = await self._root.children(path, sizes=prefix != LOG)  # of the log, names are enough, and it has hundreds
        above = f"{prefix}/" if prefix else ""
        entries = [Entry(c.name, c.size, c.is_directory) for c in children if is_key(above + c.name)]
        if not prefix and not await self._has_service_objects(entries):
            entries = [entry for entry in entries if entry.name != SERVICE]
        return sorted(entries, key=attrgetter("name"))

    async def stat(self, key: str) -> int | None:
        path = self._path(key)
        async with self._root.guard("looking at", key, reads=True):
            try:
                return await self._disk.size(path)
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                await self._root.check(error)
                return None

    async def identity(self, key: str) -> Identity | None:
        path = self._path(key)
        async with self._root.guard("looking at", key, reads=True, needed=True):
            root, found = await self._disk.status_each([self._root.path, path])
        self._root.directories.seen(root.device, root.number)
        return Identity(root.device, root.number, found.touched_ns)

    def forget_synced(self) -> None:
        self._root.directories.forget_synced()

    async def delete(self, key: str, *, durable: bool = True) -> None:
        path = self._path(key)
        async with self._root.guard("deleting", key):
            try:
                with suppress(FileNotFoundError):
                    await self._disk.unlink(path)
                if durable:  # even if another process has just removed it: its absence must be durable, too
                    await self._root.directories.sync(os.path.dirname(path))
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
                await self._root.check(error)
                return
            await self._root.directories.prune(path)

    async def delete_each(self, keys: Sequence[str]) -> None:
        async def unlink(some: Sequence[str]) -> list[str]:
            keys_of = {self._path(key): key for key in some}
            async with self._root.guard("deleting", some[0]):
                return [keys_of[path] for path in await self._disk.unlink_each([*keys_of])]

        left = [key for some in await each(unlink, _batches(keys), CALLS) for key in some]
        await super().delete_each(left)
        # Another call for one of each directory, which is gone, makes the directory durable.
        await super().delete_each([*{key.rpartition("/")[0]: key for key in keys}.values()])

    async def settle(self, key: str) -> None:
        path = self._path(key)
        async with self._root.guard("syncing", key, reads=True, needed=True):
            await self._root.settle(path)

    async def sweep(self) -> int:
        directory = f"{self._open().path}/{TEMPORARY}"
        removed = 0
        async with self._root.guard("sweeping", TEMPORARY):
            for child in await self._root.children(directory):
                if not child.is_directory and self._is_stray(child.name):
                    with suppress(FileNotFoundError):
                        await self._disk.unlink(f"{directory}/{child.name}")
                        removed += 1
        return removed

    def _is_stray(self, name: str) -> bool:
        writer = name.rpartition(".")[0]
        return writer != self._root.writer and not self._is_alive(writer)

    async def close(self) -> None:
        self._closed = True
        if self._own_disk is not None:
            await self._own_disk.close()

    def _open(self) -> Root:
        if self._closed:
            raise ClosedError(f"the store {self.url} is closed")
        return self._root

    def _path(self, key: str) -> str:
        return f"{self._open().path}/{check_key(key)}"

    async def _holds(self, path: str, expected: bytes) -> bool:
        try:
            return await self._disk.read(path, len(expected)) == expected
        except OSError as error:
            if error.errno not in {errno.ENOENT, errno.EISDIR, errno.EFBIG, errno.ELOOP}:
                raise
            return False

    async def _has_service_objects(self, entries: Sequence[Entry]) -> bool:
        """Whether `.checkpointd` contains objects beside the store's own files."""
        return any(entry.name == SERVICE for entry in entries) and bool(await self.list(SERVICE))


def _batches(keys: Sequence[str]) -> list[Sequence[str]]:
    """`keys` in parts for one call each: few parts, but some for each thread."""
    size = min(BATCH, -(-len(keys) // CALLS)) or 1
    return [keys[first : first + size] for first in range(0, len(keys), size)]


class PosixWriter:
    """Writes a large object under its final name."""

    def __init__(self, root: Root, key: str, path: str, file: WritableFile, failures: int) -> None:
        self._root, self._key, self._path, self._file = root, key, path, file
        self._written_at = path
        self._failures = failures
        """The failures of `Directories.failures` before the object was created."""
        self._broken = self._finished = False

    async def reserve(self, size: int) -> None:
        """Reserve `size` bytes if the file system can; StoreFullError if there is too little space."""
        if size > 0:
            async with self._guard("reserving space for"):
                await self._file.reserve(size)

    async def write_at(self, offset: int, data: Buffer) -> None:
        async with self._guard("writing"):
            await self._file.write_at(offset, data)

    async def finish(self, size: int) -> None:
        if self._broken:
            raise StoreError(f"{self._key!r} in {self._root.path} is lost: writing it failed before; discard it and save again")
        async with self._guard("finishing"):
            await self._file.truncate(size)
            await self._file.sync()
            await self._file.close()
            await self._name()
        self._finished = True

    async def _name(self) -> None:
        """Make the name of the object durable."""
        await self._root.directories.sync_names(self._path)
        if self._root.directories.failures(self._path) > self._failures:
            raise OSError(errno.EIO, "its name may be lost, since a sync of its directory has failed meanwhile")

    async def discard(self) -> None:
        if self._finished:
            return
        self._broken = True
        with suppress(OSError):
            await self._file.close()
        with suppress(OSError):
            await self._root.disk.unlink(self._written_at)

    @asynccontextmanager
    async def _guard(self, doing: str) -> AsyncIterator[None]:
        """After a call that failed or was cancelled, the object is lost."""
        try:
            async with self._root.guard(doing, self._key):
                yield
        except BaseException:
            self._broken = True
            raise


class PosixReplacement(PosixWriter):
    """Writes a large object to a temporary file, which takes the place of the object of that name at the end."""

    def __init__(self, root: Root, key: str, path: str, file: WritableFile, temporary: str) -> None:
        super().__init__(root, key, path, file, 0)
        self._written_at = temporary

    async def _name(self) -> None:
        await self._root.rename(self._written_at, self._path, self._key)


async def _reserved(writer: PosixWriter, nbytes: int) -> PosixWriter:
    """`writer`, with so many bytes reserved. If the disk lacks them, what it has created goes."""
    try:
        await writer.reserve(nbytes)
    except BaseException:
        await writer.discard()
        raise
    return writer
