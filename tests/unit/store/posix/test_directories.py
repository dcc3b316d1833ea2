"""POSIX-4 of the POSIX store: calls that need the same directory synced at the same time share one fsync."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from checkpointd.errors import StoreError
from checkpointd.store.posix.directories import Directories
from checkpointd.store.posix.disk import WritableFile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore

KEYS = [f"t/a/{number:05d}.index" for number in range(8)]


class Gated(OsDisk):
    """Records what is synced. Each fsync of the directory `t/a` waits for `gate`, and then fails if `failing`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._slow = str(root / "t/a")
        self.gate, self.failing = asyncio.Event(), False
        self.synced: list[str] = []
        self.names: list[set[str]] = []
        """What each fsync of `t/a` found there when it began."""

    async def sync_directory(self, path: str) -> None:
        self.synced.append(path)
        if path == self._slow:
            self.names.append(set(os.listdir(path)))
            await self.gate.wait()
            if self.failing:
                raise OSError(errno.EIO, "Input/output error")
        await super().sync_directory(path)

    async def sync_file(self, path: str) -> None:
        self.synced.append(path)
        await super().sync_file(path)


class FailsOnce(Gated):
    """The first fsync of `t/a` fails with the error number `reason`."""

    def __init__(self, root: Path, reason: int) -> None:
        super().__init__(root)
        self._reason = reason

    async def sync_directory(self, path: str) -> None:
        is_first = not self.names
        await super().sync_directory(path)
        if is_first and self.names:
            raise OSError(self._reason, os.strerror(self._reason))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


async def begun(disk: Gated, syncs: int) -> None:
    while len(disk.names) < syncs:
        await asyncio.sleep(0)


@pytest.fixture
def asked(root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has an entry for each sync of `t/a` that was asked for: whoever asks has given its file its name."""
    asked, sync = list[str](), Directories.sync

    async def noted(directories: Directories, directory: str) -> None:
        if directory == str(root / "t/a"):
            asked.append(directory)
        await sync(directories, directory)

    monkeypatch.setattr(Directories, "sync", noted)
    return asked


async def waiting(asked: list[str], count: int) -> None:
    """Return when so many calls wait for a sync."""
    while len(asked) < count:
        await asyncio.sleep(0)


async def test_calls_that_come_while_a_sync_runs_share_the_next_one(root: Path, asked: list[str]) -> None:
    disk = Gated(root)
    store = PosixStore(root, disk)
    first = asyncio.create_task(store.put_if_absent(KEYS[0], b""))
    await begun(disk, 1)
    others = [asyncio.create_task(store.put_if_absent(key, b"")) for key in KEYS[1:]]
    await waiting(asked, len(KEYS))
    assert len(disk.names) == 1
    assert not any(task.done() for task in (first, *others))
    disk.gate.set()
    assert await asyncio.gather(first, *others) == [True] * len(KEYS)
    names = [os.path.basename(key) for key in KEYS]
    assert disk.names == [{names[0]}, set(names)]
    assert len(disk.synced) < 5 * len(KEYS) / 2  # one by one, each call takes three


async def test_a_sync_that_fails_fails_for_all_that_share_it_and_the_next_one_is_new(root: Path, asked: list[str]) -> None:
    disk = Gated(root)
    store = PosixStore(root, disk)
    calls = [asyncio.create_task(store.put_if_absent(key, b"")) for key in KEYS[:3]]
    await waiting(asked, 3)
    disk.failing = True
    disk.gate.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in found] == [StoreError] * 3
    disk.failing = False
    assert await store.put_if_absent(KEYS[3], b"")
    assert not await store.put_if_absent(KEYS[0], b"")


@pytest.mark.parametrize("reason", [errno.EIO, errno.ENOENT, errno.EMFILE])
async def test_a_sync_that_fails_fails_for_those_who_wait_for_the_next_one(root: Path, asked: list[str], reason: int) -> None:
    """The kernel tells an error once, so a later sync can succeed although the names are lost. A directory that has gone away
    tells nothing about the one that is there now, nor does one that could not be opened.
    """

    disk = FailsOnce(root, reason)
    store = PosixStore(root, disk)
    calls = [asyncio.create_task(store.put_if_absent(KEYS[0], b""))]
    await begun(disk, 1)
    calls += [asyncio.create_task(store.put_if_absent(key, b"")) for key in KEYS[1:3]]
    await waiting(asked, 3)
    disk.gate.set()
    found = await asyncio.gather(*calls, return_exceptions=True)
    if reason == errno.EIO:
        assert [type(error) for error in found] == [StoreError] * 3
    else:
        assert found[1:] == [True] * 2
    assert await store.put_if_absent(KEYS[3], b"")


@pytest.mark.parametrize("when", ["later", "while it is created", "while it is finished"])
async def test_a_large_object_whose_directory_a_failed_sync_may_have_lost_is_not_called_durable(root: Path, when: str) -> None:
    class OfTheDirectoryAbove(OsDisk):
        fails = False

        async def sync_directory(self, path: str) -> None:
            if self.fails and path == str(root / "t"):
                self.fails = False
                raise OSError(errno.EIO, "Input/output error")
            if when == "while it is finished" and path == str(root / "t/a"):
                await others()
            await super().sync_directory(path)

        async def create(self, path: str) -> WritableFile:
            created = await super().create(path)
            if when == "while it is created" and path.endswith(".chunks"):
                await others()
            return created

    async def others() -> None:
        disk.fails = True
        with pytest.raises(StoreError):
            await store.put("t/b/other", b"")

    disk = OfTheDirectoryAbove()
    store = PosixStore(root, disk)
    writer = await store.open_writer("t/a/00000-0.chunks", size_hint=1)
    if when == "later":
        await others()
    with pytest.raises(StoreError, match="its name may be lost"):
        await writer.finish(0)


@pytest.mark.parametrize("reason", [errno.EIO, errno.EMFILE])
async def test_a_large_object_whose_name_a_failed_sync_may_have_lost_is_not_called_durable(root: Path, reason: int) -> None:
    """Its name was there long before: the error was told to another call, such as the renewal of a lease."""

    disk = FailsOnce(root, reason)
    disk.gate.set()
    store = PosixStore(root, disk)
    writers = [await store.open_writer(f"t/a/0000{rank}-0.chunks", size_hint=1) for rank in range(2)]
    with pytest.raises(StoreError):
        await store.put(KEYS[0], b"")
    for writer in writers:
        if reason == errno.EIO:
            with pytest.raises(StoreError, match="its name may be lost"):
                await writer.finish(0)
            await writer.discard()
        else:
            await writer.finish(0)
    later = await store.open_writer("t/a/00002-0.chunks", size_hint=1)
    await later.finish(0)


async def test_a_cancelled_call_takes_no_sync_from_the_others(root: Path, asked: list[str]) -> None:
    disk = Gated(root)
    store = PosixStore(root, disk)
    first = asyncio.create_task(store.put_if_absent(KEYS[0], b""))
    await begun(disk, 1)
    second, third = (asyncio.create_task(store.put_if_absent(key, b"")) for key in KEYS[1:3])
    await waiting(asked, 3)
    for task in (first, second):
        task.cancel()
    disk.gate.set()
    assert await third
    assert set(disk.names[-1]) >= {os.path.basename(KEYS[2])}
    for task in (first, second):
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_loop_that_ends_in_a_sync_leaves_the_store_usable(root: Path, asked: list[str]) -> None:
    """A sync that never began, since its loop was torn down, is not waited for."""
    disk = Gated(root)
    store = PosixStore(root, disk)
    first = asyncio.create_task(store.put_if_absent(KEYS[0], b""))
    await begun(disk, 1)
    second = asyncio.create_task(store.put_if_absent(KEYS[1], b""))
    await waiting(asked, 2)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    disk.gate.set()
    assert await store.put_if_absent(KEYS[2], b"")


@pytest.mark.parametrize("durable", [True, False])
async def test_what_need_not_be_durable_is_not_synced(root: Path, durable: bool) -> None:
    disk = Gated(root)
    disk.gate.set()
    store = PosixStore(root, disk)
    await store.put_if_absent(KEYS[0], b"0")
    disk.synced.clear()
    assert await store.put_if_absent(KEYS[1], b"1", durable=durable)
    assert not await store.put_if_absent(KEYS[1], b"2", durable=durable)
    await store.delete(KEYS[0], durable=durable)
    assert bool(disk.synced) == durable
    assert await store.get(KEYS[1]) == b"1"
    assert await store.stat(KEYS[0]) is None


@pytest.mark.parametrize("reason", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
async def test_a_file_system_that_syncs_no_directory_is_named_by_every_call(root: Path, reason: int) -> None:
    class Refuses(OsDisk):
        async def sync_directory(self, path: str) -> None:
            raise OSError(reason, os.strerror(reason))

    async with PosixStore(root, Refuses(str(root))) as store:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"fsync of a directory.*: use a root on one that can"):
                await store.put("latest", b"1")
