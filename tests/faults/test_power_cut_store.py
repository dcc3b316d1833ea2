"""Durability of the store, invariants STORE-1 to STORE-5: the power goes right after a call has returned.

An ext4 is shut down without flushing anything, then mounted again. The same calls on disks that leave out an fsync do lose what
they promised: so the cut cuts, and each fsync of the store is needed.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from checkpointd.errors import StoreError
from checkpointd.store.posix.disk import WritableFile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore
from tests.faults import mounts

pytestmark = [pytest.mark.root, pytest.mark.power_cut, pytest.mark.xdist_group("mounts")]

MIB = 1024 * 1024
BODY = os.urandom(300_000)
KEY = "t/a/outcome"


@pytest.fixture(scope="module")
def ext4() -> Iterator[mounts.Ext4]:
    with mounts.ext4_image(64 * MIB, Path(tempfile.gettempdir())) as mounted:
        yield mounted


@pytest.fixture
def root(ext4: mounts.Ext4, tmp_path: Path) -> Path:
    """A root of the test's own, which nobody has made yet."""
    return ext4.path / tmp_path.name / "deep" / "root"


async def after_cut(ext4: mounts.Ext4, root: Path, key: str) -> bytes | None:
    """Cut the power; what a new process then finds."""
    mounts.power_cut(ext4)
    async with PosixStore(root) as store:
        return await store.get(key) if await store.stat(key) is not None else None


# --- what the store promises: each step ends with KEY holding BODY, or absent ---


async def create(root: Path, disk: OsDisk) -> None:
    assert await PosixStore(root, disk).put_if_absent(KEY, BODY)


async def lose_the_race(root: Path, disk: OsDisk) -> None:
    """The winner has died between its link and its sync; the loser goes on from what it saw."""
    await create(root, NoDirectorySync())
    assert not await PosixStore(root, disk).put_if_absent(KEY, b"other")


async def settle(root: Path, disk: OsDisk) -> None:
    await create(root, NoDirectorySync())
    await PosixStore(root, disk).settle(KEY)


async def replace(root: Path, disk: OsDisk) -> None:
    await PosixStore(root).put(KEY, b"old")
    await PosixStore(root, disk).put(KEY, BODY)


async def replace_if_match(root: Path, disk: OsDisk) -> None:
    await PosixStore(root).put(KEY, b"old")
    assert await PosixStore(root, disk).put_if_match(KEY, b"old", BODY)


async def write_large(root: Path, disk: OsDisk) -> None:
    writer = await PosixStore(root, disk).open_writer(KEY)
    await writer.write_at(100_001, BODY[100_001:])
    await writer.write_at(0, BODY[:100_001])
    await writer.finish(len(BODY))


async def write_large_directly(root: Path, disk: OsDisk) -> None:
    """From aligned memory into reserved space, cut to an odd size at the end."""
    with mmap.mmap(-1, MIB) as arena, memoryview(arena) as view:
        arena.write(BODY)
        writer = await PosixStore(root, disk).open_writer(KEY, size_hint=MIB)
        await writer.write_at(MIB // 2, view[MIB // 2 :])
        await writer.write_at(0, view[: MIB // 2])
        await writer.finish(len(BODY))


async def create_where_others_emptied(root: Path, disk: OsDisk) -> None:
    """This store knew the directories; another one has removed them, and a third, now dead, has made them again."""
    store = PosixStore(root, disk)
    await store.put_if_absent("t/a/vote", b"")
    await PosixStore(root).delete("t/a/vote")
    await PosixStore(root, NoDirectorySync()).put("t/a/vote", b"")
    await store.put(KEY, BODY)


async def delete(root: Path, disk: OsDisk) -> None:
    await PosixStore(root).put(KEY, BODY)
    await PosixStore(root, disk).delete(KEY)


async def delete_what_another_deleted(root: Path, disk: OsDisk) -> None:
    await PosixStore(root).put(KEY, BODY)
    await PosixStore(root).put("t/a/other", b"")
    await PosixStore(root, NoDirectorySync()).delete(KEY)
    await PosixStore(root, disk).delete(KEY)


Step = Callable[[Path, OsDisk], Awaitable[None]]
MAKING: tuple[Step, ...] = (
    create,
    lose_the_race,
    settle,
    replace,
    replace_if_match,
    write_large,
    write_large_directly,
    create_where_others_emptied,
)
REMOVING: tuple[Step, ...] = (delete, delete_what_another_deleted)


@pytest.mark.parametrize("step", MAKING)
async def test_what_a_call_returned_for_survives(ext4: mounts.Ext4, root: Path, step: Step) -> None:
    await step(root, OsDisk())
    assert await after_cut(ext4, root, KEY) == BODY


@pytest.mark.parametrize("step", REMOVING)
async def test_what_was_deleted_does_not_come_back(ext4: mounts.Ext4, root: Path, step: Step) -> None:
    await step(root, OsDisk())
    assert await after_cut(ext4, root, KEY) is None


async def test_a_cut_in_the_middle_of_a_large_object_leaves_the_rest_alone(ext4: mounts.Ext4, root: Path) -> None:
    store = PosixStore(root)
    await store.put("t/latest", b"before")
    writer = await store.open_writer(KEY, size_hint=MIB)
    await writer.write_at(1, BODY)
    assert await after_cut(ext4, root, "t/latest") == b"before"
    with pytest.raises(StoreError, match="EIO"):
        await writer.finish(len(BODY) + 1)
    await writer.discard()


# --- what is lost where an fsync is left out ---


class NoSyncFile:
    """A file whose fsync does nothing."""

    def __init__(self, file: WritableFile) -> None:
        self._file = file
        self.write_at, self.reserve, self.truncate, self.close = file.write_at, file.reserve, file.truncate, file.close

    async def sync(self) -> None:
        pass


class NoFileSync(OsDisk):
    async def create(self, path: str) -> WritableFile:
        file = await super().create(path)
        vars(file)["_write_back"] = lambda *_: None  # large writes push what they wrote to the disk as well
        return NoSyncFile(file)

    async def sync_file(self, path: str) -> None:
        pass


class NoDirectorySync(OsDisk):
    async def sync_directory(self, path: str) -> None:
        pass


class NoSync(NoFileSync, NoDirectorySync):
    """Needed to show a loss where a file is synced after the name was made: on ext4 that takes all names along."""


@pytest.mark.parametrize("step", [create, write_large])
async def test_without_file_fsync_content_is_lost(ext4: mounts.Ext4, root: Path, step: Step) -> None:
    await step(root, NoFileSync())
    assert await after_cut(ext4, root, KEY) != BODY


@pytest.mark.parametrize("step", [create, replace, replace_if_match])
async def test_without_directory_fsync_names_are_lost(ext4: mounts.Ext4, root: Path, step: Step) -> None:
    await step(root, NoDirectorySync())
    assert await after_cut(ext4, root, KEY) != BODY


@pytest.mark.parametrize("step", [lose_the_race, settle])
async def test_without_any_fsync_what_was_seen_is_lost(ext4: mounts.Ext4, root: Path, step: Step) -> None:
    await step(root, NoSync())
    assert await after_cut(ext4, root, KEY) is None


@pytest.mark.parametrize("step", REMOVING)
async def test_without_directory_fsync_the_deleted_comes_back(ext4: mounts.Ext4, root: Path, step: Step) -> None:
    await step(root, NoDirectorySync())
    assert await after_cut(ext4, root, KEY) == BODY
