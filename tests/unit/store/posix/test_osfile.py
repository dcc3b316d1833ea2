"""Invariants OSFILE-1 to OSFILE-4 of `checkpointd.store.posix.osfile`, and where O_DIRECT is refused."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.store.posix import osfile
from checkpointd.store.posix.osfile import BLOCK_BYTES, DIRECT_BYTES_MIN, OsFile, direct_part
from checkpointd.store.posix.threads import Threads

MIB = 1024 * 1024


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(4, "test")
    yield threads
    threads.close()


@pytest.fixture
def file(tmp_path: Path, threads: Threads) -> Iterator[OsFile]:
    file = OsFile(str(tmp_path / "file"), bulk=threads, small=threads)
    yield file
    file.close_now()


@pytest.fixture
def arena() -> memoryview:
    """One MiB of random bytes that begins at a page."""
    mapped = mmap.mmap(-1, MIB)
    mapped.write(os.urandom(MIB))
    return memoryview(mapped)


class Writes:
    """Every pwrite to the file of the fixture, and whether it went by O_DIRECT.

    Threads that another test left behind may write to files of their own meanwhile.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, before: Callable[[bool, int], int | None] = lambda _d, _o: None
    ) -> None:
        self.seen: list[tuple[bool, int, int]] = []
        self._pwrite, self._before = os.pwrite, before
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, descriptor: int, data: memoryview, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{descriptor}").endswith("/file"):
            return self._pwrite(descriptor, data, offset)
        direct = is_direct(descriptor)
        size = self._before(direct, offset)
        written = self._pwrite(descriptor, data if size is None else data[:size], offset)
        self.seen.append((direct, offset, written))
        return written


def is_direct(descriptor: int) -> bool:
    flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
    return bool(int(flags, 8) & os.O_DIRECT)


def open_files(below: Path) -> list[str]:
    names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return [name for name in names if name.startswith(str(below))]


def content(tmp_path: Path) -> bytes:
    return (tmp_path / "file").read_bytes()


@given(
    offset=st.integers(0, 5 * BLOCK_BYTES),
    start=st.integers(0, 2 * BLOCK_BYTES),
    size=st.integers(0, DIRECT_BYTES_MIN + 4 * BLOCK_BYTES),
)
def test_osfile_1_the_direct_part_is_whole_blocks_inside(offset: int, start: int, size: int) -> None:
    with mmap.mmap(-1, 2 * BLOCK_BYTES + DIRECT_BYTES_MIN + 4 * BLOCK_BYTES) as mapped:
        part = np.frombuffer(mapped, np.uint8)[start : start + size]
        address = part.ctypes.data
        head, body = direct_part(offset, part)
        del part
    assert min(head, body) >= 0
    assert head + body <= size
    if body:
        assert (offset + head) % BLOCK_BYTES == (address + head) % BLOCK_BYTES == body % BLOCK_BYTES == 0
        assert head < BLOCK_BYTES
        assert size - head - body < BLOCK_BYTES
    elif (address - offset) % BLOCK_BYTES == 0:
        assert size < DIRECT_BYTES_MIN + 2 * BLOCK_BYTES


async def test_aligned_memory_goes_directly_and_without_a_copy(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    await file.write_at(0, arena)
    assert writes.seen == [(True, 0, MIB)]
    assert content(tmp_path) == arena.tobytes()


async def test_the_ends_of_a_part_are_buffered(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    await file.write_at(100, arena[100 : MIB - 7])
    tail = MIB - BLOCK_BYTES
    assert sorted(writes.seen) == [
        (False, 100, BLOCK_BYTES - 100),
        (False, tail, BLOCK_BYTES - 7),
        (True, BLOCK_BYTES, tail - BLOCK_BYTES),
    ]
    assert content(tmp_path)[100:] == arena[100 : MIB - 7].tobytes()


async def test_memory_that_lies_across_blocks_is_buffered(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = Writes(monkeypatch)
    await file.write_at(0, arena[1:])
    assert writes.seen == [(False, 0, MIB - 1)]
    assert content(tmp_path) == arena[1:].tobytes()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
async def test_refused_at_open_everything_is_buffered(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    opened = os.open

    def refuse(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", refuse)
    writes = Writes(monkeypatch)
    await asyncio.gather(file.write_at(0, arena[: MIB // 2]), file.write_at(MIB // 2, arena[MIB // 2 :]))
    assert sorted(writes.seen) == [(False, 0, MIB // 2), (False, MIB // 2, MIB // 2)]
    assert content(tmp_path) == arena.tobytes()


async def test_refused_at_write_the_rest_is_buffered(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(direct: bool, offset: int) -> None:
        if direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    writes = Writes(monkeypatch, refuse)
    await file.write_at(0, arena[: MIB // 2])
    await file.write_at(MIB // 2, arena[MIB // 2 :])
    assert writes.seen == [(False, 0, MIB // 2), (False, MIB // 2, MIB // 2)]
    assert content(tmp_path) == arena.tobytes()


@pytest.mark.parametrize("first", [BLOCK_BYTES, 5 * BLOCK_BYTES, 512, 5000])
async def test_short_writes_are_continued(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Also where the disk stops inside a block, from where O_DIRECT cannot go on."""

    def shorten(direct: bool, offset: int) -> int | None:
        # To the disk 512 bytes may be a block, so a direct write may end there; a buffered one may anywhere.
        return first if direct == (first % 512 == 0) else None

    Writes(monkeypatch, shorten)
    await file.write_at(0, arena)
    await file.write_at(MIB, arena[1:])
    assert content(tmp_path) == arena.tobytes() + arena[1:].tobytes()


async def test_other_errors_are_not_swallowed(file: OsFile, arena: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(direct: bool, offset: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    Writes(monkeypatch, fail)
    for part in (arena, arena[1:]):
        with pytest.raises(OSError, match="No space"):
            await file.write_at(0, part)


async def test_reserve_takes_the_space_at_once(file: OsFile, tmp_path: Path) -> None:
    await file.reserve(3 * MIB + 1)
    await file.reserve(0)
    assert (tmp_path / "file").stat().st_blocks * 512 >= 3 * MIB
    await file.truncate(5)
    assert content(tmp_path) == bytes(5)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.ENOSYS])
async def test_reserve_where_the_file_system_cannot(file: OsFile, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(osfile, "_libc", FailingLibc([number]))
    await file.reserve(MIB)


async def test_reserve_goes_on_after_a_signal(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    libc = FailingLibc([errno.EINTR, errno.EINTR, errno.ENOSPC])
    monkeypatch.setattr(osfile, "_libc", libc)
    with pytest.raises(OSError, match="No space"):
        await file.reserve(MIB)
    assert libc.numbers == []


class FailingLibc:
    """A libc whose fallocate fails with one number after the other."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def fallocate(self, *_: int) -> int:
        ctypes.set_errno(self.numbers.pop(0))
        return -1


async def test_osfile_2_close_waits_for_calls_in_flight(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the caller's task is gone: a descriptor that is closed and given out again would get these bytes."""
    entered, go_on = threading.Event(), threading.Event()

    def hold(direct: bool, offset: int) -> None:
        entered.set()
        assert go_on.wait(60)

    writes = Writes(monkeypatch, hold)
    write = asyncio.create_task(file.write_at(0, arena))
    await asyncio.to_thread(entered.wait)
    close = asyncio.create_task(file.close())
    done, _ = await asyncio.wait({close}, timeout=0.05)
    assert not done
    go_on.set()
    await asyncio.gather(write, close)
    assert writes.seen == [(True, 0, MIB)]


async def test_osfile_2_a_closed_file_refuses_calls(file: OsFile) -> None:
    await file.close()
    await file.close()
    for call in (file.write_at(0, b"x"), file.truncate(1), file.sync(), file.reserve(1)):
        with pytest.raises(OSError, match="closed"):
            await call


async def test_osfile_3_a_failed_fsync_is_never_repeated(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail_once(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail_once)
    await file.write_at(0, b"x")
    for _ in range(2):
        with pytest.raises(OSError, match=r"Input/output|lost"):
            await file.sync()
    assert len(calls) == 1


async def test_no_descriptor_is_left(tmp_path: Path, threads: Threads, arena: memoryview) -> None:
    file = OsFile(str(tmp_path / "file"), bulk=threads, small=threads)
    await file.write_at(0, arena)
    await file.close()
    assert not open_files(tmp_path)


# --- OSFILE-4 ----------------------------------------------------------------------------------------------------------


class RangesOfLibc:
    """A libc that notes which ranges are written back, and fails with `number` where it is not 0."""

    def __init__(self, number: int = 0) -> None:
        self.ranges: list[tuple[int, int]] = []
        self._number = number

    def sync_file_range(self, descriptor: int, offset: int, nbytes: int, flags: int) -> int:
        assert flags == 7  # wait, write, and wait for that
        self.ranges.append((offset, nbytes))
        ctypes.set_errno(self._number)
        return -1 if self._number else 0


@pytest.fixture
def no_direct(file: OsFile) -> None:
    file._direct_refused = True


@pytest.mark.usefixtures("no_direct")
async def test_osfile_4_a_large_write_through_the_cache_leaves_it_at_once(
    file: OsFile, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = RangesOfLibc()
    monkeypatch.setattr(osfile, "_libc", libc)
    await file.write_at(0, arena)
    await file.write_at(MIB, arena[:100])  # a small one may stay until `sync`
    await file.write_at(2 * MIB, arena[: DIRECT_BYTES_MIN + 1])
    assert libc.ranges == [(0, MIB), (2 * MIB, DIRECT_BYTES_MIN + 1)]


@pytest.mark.usefixtures("no_direct")
async def test_osfile_4_what_a_file_system_cannot_be_asked_for_is_left_to_sync(
    file: OsFile, tmp_path: Path, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(osfile, "_libc", RangesOfLibc(errno.ENOSYS))
    await file.write_at(0, arena)
    await file.sync()
    assert (tmp_path / "file").read_bytes() == bytes(arena)


@pytest.mark.usefixtures("no_direct")
async def test_osfile_3_osfile_4_what_cannot_be_written_back_is_lost(
    file: OsFile, arena: memoryview, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(osfile, "_libc", RangesOfLibc(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        await file.write_at(0, arena)
    with pytest.raises(OSError, match="content is lost"):
        await file.sync()
