"""A simulated disk for simulated processes. The POSIX store runs on it as it runs on a real disk.

`simfs.py` states the effects of a power cut and of a failed fsync (SIMFS-1 to SIMFS-7). This module adds the processes:
  SIMDISK-1  Every effect (create, write, reserve, truncate, fsync, link, rename, unlink, mkdir, rmdir, fsync of a directory)
      has a number, counted from 1 over all processes. Just after any of them, `after` may kill, pause or cut the power.
  SIMDISK-2  A killed process has no later effect, and its calls never return. Its earlier effects stay, even if it never
      learned of them. A write of more than a page may stop at a page boundary. Its locks are free at once.
  SIMDISK-3  A paused process keeps its locks and, when it is resumed, continues where it was.
  SIMDISK-4  Effects take virtual time from the seed before and after they happen, so that calls in flight overtake each other.
  SIMDISK-5  `before` may refuse any effect with an error of the system (ENOSPC, EIO). SIMFS-5 to SIMFS-7 then state the part of
      the effect that is left. An effect that is refused with ETIMEDOUT has happened all the same: a file server has lost its
      reply.
Only tasks of the process that owns a view may call it (`Process.spawn`); any other call is a mistake in the test.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from typing_extensions import Buffer

from checkpointd.store.posix.disk import Child, FileStatus
from checkpointd.testing.simfs import Node, SimDirectory, SimFile, SimFs
from checkpointd.testing.simloop import Process, ProcessState, current_process
from checkpointd.testing.simstorage import Effect, SimStorage

T = TypeVar("T")

PAGE_BYTES = 4096
ALIGNMENT = 4096


class SimDisk(SimStorage):
    """The disk of one simulated run, shared by its processes. Make it inside the run, on its SimLoop."""

    def __init__(
        self, *, root: str = "/root", alignment: int = ALIGNMENT, clones: bool = False, exchanges: bool = True
    ) -> None:
        super().__init__("disk")
        self.fs = SimFs()
        self.alignment = alignment
        self.clones, self.exchanges = clones, exchanges
        """Whether the file system can clone files and exchange two names in one step."""
        self.root = root
        self.before: Callable[[Effect], int | None] = lambda _: None
        """Called just before each effect; if it returns an errno, the effect fails (SIMDISK-5)."""
        self.fs.make_directory(root)
        self.fs.make_all_durable()

    def process(self, name: str, kind: type[ProcessDisk] | None = None) -> ProcessDisk:
        """A new process, and its view of the disk, of class `kind`. It may take the name of a dead process."""
        return (kind or ProcessDisk)(self, self._new_process(name))

    def power_cut(self) -> None:
        """Kill all processes, and leave a state of the disk that SIMFS-1 to SIMFS-4 allow."""
        super().power_cut()
        self.fs.power_cut(self.rng)

    def delay(self) -> asyncio.Future[None]:
        """The time that a call takes: mostly below 2 ms, now and then up to 50 ms, rarely up to 2 s."""
        draw = self.rng.random()
        scale = 0.002 if draw < 0.94 else 0.05 if draw < 0.995 else 2.0
        return self.loop.elapse(scale * self.rng.random())


class ProcessDisk:
    """The disk as one process sees it; `checkpointd.store.posix.disk.Disk` is the contract."""

    def __init__(self, disk: SimDisk, process: Process) -> None:
        self.disk, self.process = disk, process
        self._fs = disk.fs

    @property
    def alignment(self) -> int:
        return self.disk.alignment

    async def create(self, path: str) -> SimOpenFile:
        return SimOpenFile(self, await self.effect("create", path, lambda: self._fs.create(path)), path)

    async def read(self, path: str, size_max: int, *, past_cache: bool = False) -> bytes:
        return await self.look(lambda: _content(_bytes_of(self._fs.file(path), past_cache), size_max))

    async def read_each(self, paths: Sequence[str], size_max: int) -> list[bytes | OSError]:
        found: list[bytes | OSError] = []
        for path in paths:
            try:
                found.append(await self.read(path, size_max))
            except OSError as error:
                found.append(error)
        return found

    async def read_at(self, path: str, offset: int, out: memoryview, *, past_cache: bool = False) -> int:
        return await self.look(lambda: _copy_out(_bytes_of(self._fs.file(path), past_cache), offset, out))

    async def read_parts(self, path: str, offset: int, parts: Sequence[memoryview], then: Callable[[int], None]) -> int:
        done = 0
        for part in parts:
            done += await self.read_at(path, offset + done, part)
        then(done)
        return done

    async def sync_file(self, path: str) -> None:
        await self.sync_node(self._fs.file(path), path)

    async def sync_directory(self, path: str) -> None:
        await self.effect("sync-dir", path, lambda: self._fs.sync_directory(path))

    async def make_directory(self, path: str) -> None:
        await self.effect("mkdir", path, lambda: self._fs.make_directory(path))

    async def remove_directory(self, path: str) -> None:
        await self.effect("rmdir", path, lambda: self._fs.remove_directory(path))

    async def link(self, source: str, target: str) -> None:
        await self.effect("link", f"{source} -> {target}", lambda: self._fs.link(source, target))

    async def rename(self, source: str, target: str) -> None:
        await self.effect("rename", f"{source} -> {target}", lambda: self._fs.rename(source, target))

    async def exchange(self, one: str, other: str) -> bool:
        if self.disk.exchanges:
            await self.effect("exchange", f"{one} <-> {other}", lambda: self._fs.exchange(one, other))
        return self.disk.exchanges

    async def clone(self, source: str, target: str) -> bool:
        if self.disk.clones:
            await self.effect("clone", f"{source} -> {target}", lambda: self._fs.clone(source, target))
        return self.disk.clones

    async def protect(self, path: str) -> None:
        """Modes are not modelled: nobody but the store writes here."""

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
        await self.effect("unlink", path, lambda: self._fs.unlink(path))

    async def children(self, path: str, *, links: bool = False, sizes: bool = True) -> list[Child]:
        """Symbolic links are not modelled."""
        del links, sizes
        found = await self.look(lambda: _children(self._fs.directory(path)))
        self.disk.rng.shuffle(found)
        return found

    async def status(self, path: str) -> FileStatus:
        return await self.look(lambda: _status(self._fs.node(path)))

    async def status_each(self, paths: Sequence[str]) -> list[FileStatus]:
        return await self.look(lambda: [_status(self._fs.node(path)) for path in paths])

    async def size(self, path: str) -> int:
        return await self.look(lambda: len(self._fs.file(path).data))

    async def locked(self, path: str) -> SimLock:
        file = await self.effect("lock", path, lambda: self._open_lock(path))
        lock = SimLock(file)
        while file.locked_by is not None:
            waiter: asyncio.Future[None] = self.disk.loop.create_future()
            file.waiters.append(waiter)
            await waiter
        file.locked_by = lock
        self.process.on_death(lock.let_go)
        return lock

    def _open_lock(self, path: str) -> SimFile:
        try:
            return self._fs.create(path)
        except FileExistsError:
            return self._fs.file(path)

    # --- how a call runs ---------------------------------------------------------------------------------------

    async def look(self, act: Callable[[], T]) -> T:
        """A call that changes nothing. Its result may be outdated when it returns."""
        self._check()
        try:
            return act()
        finally:
            await self.disk.delay()

    async def effect(
        self, kind: str, path: str, act: Callable[[], T], *, size: int = 0, spoil: Callable[[], None] = lambda: None
    ) -> T:
        """A call that changes the disk by `act`, or by `spoil` if `before` refuses it."""
        self._check()
        await self.disk.delay()
        self._check()
        effect = self.disk.record(self.process.name, kind, path, size)
        refused = self.disk.before(effect)
        if self.process.state is ProcessState.DEAD:
            await self.disk.loop.create_future()
        done = False
        try:
            if refused is not None:
                self.disk.note(f"{errno.errorcode[refused]} at {effect.number}")
                if refused == errno.ETIMEDOUT:
                    act()
                    done = True
                else:
                    spoil()
                raise OSError(refused, os.strerror(refused), path)
            result = act()
            done = True
            return result
        finally:
            self.disk.after(effect, done)
            await self.disk.delay()

    async def sync_node(self, file: SimFile, path: str) -> None:
        await self.effect("fsync", path, lambda: self._fs.sync(file), spoil=lambda: self._fs.drop_dirty(file, self.disk.rng))

    def _check(self) -> None:
        if self.disk.loop.closing:
            raise asyncio.CancelledError
        if current_process() is not self.process:
            raise RuntimeError(f"a task outside process {self.process.name!r} uses its view of the disk: start it with spawn")


FAR_S_MAX = 0.3


class FarDisk(ProcessDisk):
    """The disk as a distant process sees it: every call takes up to FAR_S_MAX longer, so much happens between two calls."""

    async def look(self, act: Callable[[], T]) -> T:
        await self.disk.loop.elapse(self.disk.rng.random() * FAR_S_MAX)
        return await super().look(act)


class SimOpenFile:
    """A file open for writing; `checkpointd.store.posix.disk.WritableFile` is the contract."""

    def __init__(self, view: ProcessDisk, file: SimFile, path: str) -> None:
        self._view, self._file, self._path = view, file, path
        self._open = True

    async def write_at(self, offset: int, data: Buffer) -> None:
        part = memoryview(data).cast("B")
        cut = self._cut(offset, len(part))
        for start, stop in ((0, cut), (cut, len(part))):
            if stop > start or not len(part):
                await self._write(offset + start, part[start:stop])

    def _cut(self, offset: int, size: int) -> int:
        """The places at which a kill may stop a write: page boundaries of the file, in bytes from the start of the write."""
        pages = range(PAGE_BYTES - offset % PAGE_BYTES, size, PAGE_BYTES)
        return self._view.disk.rng.choice(pages) if pages else size

    async def _write(self, offset: int, part: memoryview) -> None:
        rng, fs = self._view.disk.rng, self._view.disk.fs
        # The copy is made at the effect and not at the call, so that a caller who changes the memory too early is noticed.
        await self._effect(
            "write",
            lambda: fs.write(self._file, offset, bytes(part)),
            size=len(part),
            spoil=lambda: fs.write(self._file, offset, bytes(part[: int(rng.random() * len(part))])),
        )

    async def reserve(self, size: int) -> None:
        await self._effect("reserve", lambda: self._grow(size), size=size)

    def _grow(self, size: int) -> None:
        if size > len(self._file.data):
            self._view.disk.fs.truncate(self._file, size)

    async def truncate(self, size: int) -> None:
        await self._effect("truncate", lambda: self._view.disk.fs.truncate(self._file, size), size=size)

    async def sync(self) -> None:
        self._check_open()
        await self._view.sync_node(self._file, self._path)

    async def close(self) -> None:
        self._open = False

    async def _effect(self, kind: str, act: Callable[[], None], *, size: int, spoil: Callable[[], None] = lambda: None) -> None:
        self._check_open()
        await self._view.effect(kind, self._path, act, size=size, spoil=spoil)

    def _check_open(self) -> None:
        if not self._open:
            raise OSError(errno.EBADF, "the file is closed")


class SimLock:
    """flock: the lock belongs to the file, even if the file has been renamed."""

    def __init__(self, file: SimFile) -> None:
        self._file = file

    async def release(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        if self._file.locked_by is not self:
            return
        self._file.locked_by = None
        waiters, self._file.waiters = self._file.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _bytes_of(file: SimFile, past_cache: bool) -> bytes:
    """The content that a reader sees. A read past the cache writes dirty pages first, and then sees the disk's content."""
    return file.durable if past_cache and not file.dirty else bytes(file.data)


def _content(data: bytes, size_max: int) -> bytes:
    if len(data) > size_max:
        raise OSError(errno.EFBIG, f"longer than the {size_max} bytes that were asked for")
    return data


def _copy_out(data: bytes, offset: int, out: memoryview) -> int:
    part = data[offset : offset + len(out)]
    out[: len(part)] = part
    return len(part)


def _status(node: Node) -> FileStatus:
    """The order of all changes stands for the time."""
    return FileStatus(node.number, len(node.data), node.changed) if isinstance(node, SimFile) else FileStatus(0, 0, 0)


def _children(directory: SimDirectory) -> list[Child]:
    return [
        Child(name, 0, True) if isinstance(node, SimDirectory) else Child(name, len(node.data), False)
        for name, node in directory.live.items()
    ]
