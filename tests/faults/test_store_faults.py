"""The POSIX store when the system fails under it: no space, read-only, and errors of the device.

After each fault the store must have said the truth, hold only whole objects under the names that count, and work again as soon
as the cause is gone.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from checkpointd.errors import StoreError, StoreFullError
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from tests.faults import mounts, strace_faults
from tests.faults.store_process import LARGE, SMALL, WRITER

pytestmark = pytest.mark.nightly

CHILD = Path(__file__).with_name("store_process.py")
MIB = 1024 * 1024
LINK = "link,linkat"
RENAME = "rename,renameat,renameat2"


# --- space ---


@pytest.fixture
def full_at_write() -> Iterator[Path]:
    with mounts.tmpfs(8 * MIB) as path:
        yield path


@pytest.fixture
def full_at_sync() -> Iterator[tuple[Path, Path]]:
    """(memory, ext4 on it): 64 MiB on 8 MiB, so that writes succeed and fsync finds no space."""
    with mounts.tmpfs(8 * MIB) as memory, mounts.ext4_image(64 * MIB, memory) as mounted:
        yield memory, mounted.path


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
class TestNoSpace:
    async def test_a_small_object_that_does_not_fit_leaves_the_old_one(self, full_at_write: Path) -> None:
        async with PosixStore(full_at_write / "root") as store:
            await store.put("latest", b"old")
            for call in (store.put("latest", bytes(9 * MIB)), store.put_if_absent("other", bytes(9 * MIB))):
                with pytest.raises(StoreFullError, match=r"ENOSPC.*free some"):
                    await call
            assert await store.get("latest") == b"old"
            assert await store.stat("other") is None
            await store.put("latest", bytes(5 * MIB))  # Of the failed tries nothing is left that takes space.
            assert await store.get("latest") == bytes(5 * MIB)

    async def test_reserving_says_at_once_that_the_disk_is_full(self, full_at_write: Path) -> None:
        async with PosixStore(full_at_write / "root") as store:
            with pytest.raises(StoreFullError, match=r"reserving space for 't/large'"):
                await store.open_writer("t/large", size_hint=9 * MIB)
            assert await store.stat("t/large") is None
            await _write_large(store, 5 * MIB)

    async def test_a_large_object_without_reserve_fails_and_frees_its_space(self, full_at_write: Path) -> None:
        async with PosixStore(full_at_write / "root") as store:
            writer = await store.open_writer("t/large")
            with pytest.raises(StoreFullError, match="t/large"):
                await writer.write_at(0, bytes(9 * MIB))
            with pytest.raises(StoreError, match="lost"):
                await writer.finish(9 * MIB)
            await writer.discard()
            await _write_large(store, 5 * MIB)

    async def test_space_that_ends_at_fsync_loses_the_object_and_nothing_else(self, full_at_sync: tuple[Path, Path]) -> None:
        memory, path = full_at_sync
        async with PosixStore(path / "root") as store:
            await store.put("t/latest", b"old")
            with pytest.raises(StoreFullError, match="ENOSPC"):
                await store.put_if_absent("t/a/outcome", os.urandom(10 * MIB))
            assert await store.stat("t/a/outcome") is None
            writer = await store.open_writer("t/a/large")
            with pytest.raises(StoreFullError, match="ENOSPC"):
                await writer.write_at(1, os.urandom(10 * MIB))  # Unaligned: by way of the page cache.
            with pytest.raises(StoreError, match="lost"):
                await writer.finish(10 * MIB + 1)
            await writer.discard()
            mounts.remount(memory, f"size={48 * MIB}")
            assert await store.get("t/latest") == b"old"
            assert await store.put_if_absent("t/a/outcome", b"commit") is True
            await _write_large(store, 10 * MIB)


# --- a file system that refuses ---


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
async def test_read_only_is_said_and_passes() -> None:
    with mounts.tmpfs(8 * MIB) as path:
        async with PosixStore(path / "root") as store:
            await store.put("t/latest", b"old")
            mounts.remount(path, "ro")
            changes = (
                store.put("t/latest", b"new"),
                store.put_if_absent("t/x", b""),
                store.open_writer("t/y"),
                store.delete("t/latest"),
            )
            for change in changes:
                with pytest.raises(StoreError, match=r"EROFS.*read-only"):
                    await change
            assert await store.get("t/latest") == b"old"
            mounts.remount(path, "rw")
            await store.put("t/latest", b"new")
            assert await store.get("t/latest") == b"new"


# --- errors of the device ---

OLD = b"old"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    """Holds an older `t/latest` and another object of the attempt, so that the directories are there."""
    async with PosixStore(tmp_path / "root") as store:
        await store.put("t/latest", OLD)
        await store.put("t/a/other", b"x")
        yield store


TEMPORARY = f".checkpointd/tmp/{WRITER}.0"
CREATED, REPLACED, LARGE_KEY = "t/a/outcome", "t/latest", "t/a/00000-0.chunks"


@pytest.mark.parametrize(
    ("calls", "on", "left"),
    [
        ("fsync", TEMPORARY, {None}),
        (LINK, CREATED, {None}),
        ("fsync", "t/a", {SMALL}),
        ("fsync", "t", {SMALL}),
        ("fsync", ".", {SMALL}),
        ("fsync", "..", {SMALL}),
    ],
)
async def test_eio_while_creating_is_never_a_success(store: Store, calls: str, on: str, left: set[bytes | None]) -> None:
    """The name is there or not, but the caller was told that it cannot rely on it, and the next try can."""
    assert "EIO" in _error(_child(store, "create", calls, on, "error=EIO"))
    assert await _content(store, CREATED) in left
    assert await store.sweep() == 0
    assert await store.put_if_absent(CREATED, SMALL) is (None in left)
    assert await store.get(CREATED) == SMALL


@pytest.mark.parametrize(
    ("calls", "on", "left"),
    [("fsync", TEMPORARY, OLD), (RENAME, TEMPORARY, OLD), ("fsync", "t", SMALL), ("fsync", ".", SMALL)],
)
async def test_eio_while_replacing_is_never_a_success(store: Store, calls: str, on: str, left: bytes) -> None:
    assert "EIO" in _error(_child(store, "replace", calls, on, "error=EIO"))
    assert await store.get(REPLACED) == left
    assert await store.sweep() == 0
    await store.put(REPLACED, b"newer")
    assert await store.get(REPLACED) == b"newer"


@pytest.mark.parametrize(
    ("calls", "on"), [("fsync", LARGE_KEY), ("pwrite64", LARGE_KEY), ("ftruncate", LARGE_KEY), ("fsync", "t/a"), ("fsync", ".")]
)
async def test_eio_in_a_large_object_loses_it(store: Store, calls: str, on: str) -> None:
    """`finish` raises, now and when asked again, and `discard` leaves nothing."""
    traced = _child(store, "write_large", calls, on, "error=EIO")
    _error(traced)
    assert await store.stat(LARGE_KEY) is None
    if calls == "fsync":
        assert len(traced.calls) == 1, "after a failed fsync, another one reports success for what is lost"
    await _write_large(store, MIB, key=LARGE_KEY)


async def test_eio_while_removing_the_temporary_file_is_no_failure(store: Store) -> None:
    """The object is durable; what is left over goes with the next sweep."""
    traced = _child(store, "create", "unlink,unlinkat", TEMPORARY, "error=EIO")
    assert json.loads(traced.output) == [True, None]
    assert traced.failed_calls == 1
    assert await store.get(CREATED) == SMALL
    assert await store.sweep() == 1


async def test_no_hard_links_is_said(store: Store) -> None:
    message = _error(_child(store, "create", LINK, CREATED, "error=EPERM"))
    assert "hard links" in message
    assert await store.stat(CREATED) is None


async def test_without_a_fault_the_child_succeeds(store: Store) -> None:
    """Otherwise the tests above would show nothing."""
    for step, key, body in (
        ("create", CREATED, SMALL),
        ("replace", REPLACED, SMALL),
        ("write_large", LARGE_KEY, LARGE + LARGE),
    ):
        traced = _child(store, step, "fsync", "no/such/path", "error=EIO")
        assert traced.returncode == 0
        assert json.loads(traced.output)[1] is None
        assert await store.get(key) == body


def _child(store: Store, step: str, calls: str, on: str, fault: str) -> strace_faults.Traced:
    path = Path(os.path.normpath(Path(store.url) / on))
    return strace_faults.run_python([str(CHILD), store.url, step], calls=calls, on=path, fault=fault)


def _error(traced: strace_faults.Traced) -> str:
    """The message of the StoreError that the child met."""
    assert traced.returncode == 0, traced
    assert traced.failed_calls, f"the fault did not happen: {traced}"
    result, error = json.loads(traced.output)
    assert result is None, f"the fault went unnoticed: {traced}"
    code, message = error
    assert code == "StoreError", message
    return str(message)


async def _content(store: Store, key: str) -> bytes | None:
    return None if await store.stat(key) is None else await store.get(key)


async def _write_large(store: Store, size: int, *, key: str = "t/large") -> None:
    body = os.urandom(size)
    writer = await store.open_writer(key, size_hint=size)
    await writer.write_at(0, body)
    await writer.finish(size)
    assert await store.get(key) == body
