"""The POSIX store beyond the contract: its own files, its directories, and who gets in its way."""

# ruff: noqa: ASYNC240  Looking at files in between is the test's own business, and nothing waits for it.

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from checkpointd.errors import NotFoundError, StoreError, UsageError
from checkpointd.store import writers
from checkpointd.store.base import Store
from checkpointd.store.posix.disk import WritableFile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore

DEAD = "host.boot.1.999.5.abcdef"
CALLS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "put_if_absent": lambda store: store.put_if_absent("a", b""),
    "put": lambda store: store.put("a", b""),
    "put_if_match": lambda store: store.put_if_match("a", None, b""),
    "open_writer": lambda store: store.open_writer("a"),
    "get": lambda store: store.get("a"),
    "get_range": lambda store: store.get_range("a", 0, memoryview(bytearray(1))),
    "list": lambda store: store.list(""),
    "list below": lambda store: store.list("a"),
    "stat": lambda store: store.stat("a"),
    "delete": lambda store: store.delete("a"),
    "settle": lambda store: store.settle("a"),
    "sweep": lambda store: store.sweep(),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
async def store(root: Path) -> AsyncIterator[PosixStore]:
    async with PosixStore(root) as store:
        yield store


def names(path: Path) -> set[str]:
    """Every file and directory below `path`."""
    return {str(found.relative_to(path)) for found in path.rglob("*")}


# --- the root ---


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("below", ["file", "file/run1", "file/deep/run1"])
async def test_a_root_that_is_a_file_is_said_by_every_call(tmp_path: Path, call: str, below: str) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    async with PosixStore(tmp_path / below) as store:
        with pytest.raises(UsageError, match=r"root .* is a file"):
            await CALLS[call](store)
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.parametrize("call", ["get", "get_range", "list", "stat", "delete", "settle", "sweep"])
async def test_reading_makes_nothing(root: Path, store: PosixStore, call: str) -> None:
    with contextlib.suppress(NotFoundError):
        await CALLS[call](store)
    assert not root.exists()


async def test_a_root_that_another_user_could_not_write_is_said(store: PosixStore, root: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    root.mkdir(mode=0o500)
    with pytest.raises(StoreError, match=r"EACCES.*permission"):
        await store.put("a", b"")


# --- its own files ---


async def test_only_objects_and_the_lock_are_left(store: PosixStore, root: Path) -> None:
    await store.put_if_absent("t/a/outcome", b"1")
    await store.put_if_absent("t/a/outcome", b"2")
    await store.put("latest", b"1")
    await store.put_if_match("latest", b"1", b"2")
    with pytest.raises(StoreError):
        await store.put("t", b"a directory is in the way")
    with pytest.raises(StoreError):
        await store.put_if_absent("t/a", b"a directory is in the way")
    assert names(root) == {"t", "t/a", "t/a/outcome", "latest", ".checkpointd", ".checkpointd/tmp", ".checkpointd/lock"}


async def test_sweep_takes_what_the_dead_left_and_nothing_of_the_living(store: PosixStore, root: Path) -> None:
    await store.put("t/latest", b"x")
    temporaries = root / ".checkpointd/tmp"
    living = f"{writers.new_writer()}.0"
    for name in (f"{DEAD}.0", f"{DEAD}.17", "garbage", living):
        (temporaries / name).write_bytes(b"half")
    assert await store.sweep() == 3
    assert await store.sweep() == 0
    assert [path.name for path in temporaries.iterdir()] == [living]


async def test_a_swept_writer_fails_and_creates_nothing(root: Path) -> None:
    """A zombie of an older incarnation, on a host that its successor does not see, wakes up between write and link."""

    class Paused(OsDisk):
        async def link(self, source: str, target: str) -> None:
            assert await successor.sweep() == 1
            await super().link(source, target)

        async def rename(self, source: str, target: str) -> None:
            assert await successor.sweep() == 1
            await super().rename(source, target)

    successor = PosixStore(root)
    zombie = PosixStore(root, Paused(), writer=DEAD)
    with pytest.raises(StoreError, match="newer start"):
        await zombie.put_if_absent("t/a/outcome", b"abort")
    with pytest.raises(StoreError, match="newer start"):
        await zombie.put("latest", b"old")
    assert names(root) == {".checkpointd", ".checkpointd/tmp"}
    assert await successor.stat("t/a/outcome") is None
    assert await successor.stat("latest") is None


async def test_files_that_cannot_be_objects_are_not_listed(store: PosixStore, root: Path) -> None:
    await store.put("t/a", b"x")
    Path(os.fsdecode(os.fsencode(root / "t") + b"/\xff")).write_bytes(b"not UTF-8")
    assert [entry.name for entry in await store.list("t")] == ["a"]


# --- directories ---


async def test_posix_3_emptied_directories_go_with_their_last_object(store: PosixStore, root: Path) -> None:
    await store.put("t/a/outcome", b"")
    await store.put("t/b/outcome", b"")
    await store.put(".checkpointd/starts/00000001", b"")
    await store.delete("t/a/outcome")
    assert not (root / "t/a").exists()
    assert (root / "t/b/outcome").exists()
    await store.delete("t/b/outcome")
    assert not (root / "t").exists()
    await store.delete(".checkpointd/starts/00000001")
    assert (root / ".checkpointd/starts").is_dir()
    await store.put(".checkpointd/shown/ckpt/step1/record", b"")
    await store.delete(".checkpointd/shown/ckpt/step1/record")
    assert (root / ".checkpointd/shown").is_dir()
    assert not (root / ".checkpointd/shown/ckpt").exists()
    await store.put("only", b"")
    await store.delete("only")
    assert root.is_dir()


class Watched(OsDisk):
    """Records the directories that are synced, relative to `root`."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root
        self.synced: list[str] = []

    async def sync_directory(self, path: str) -> None:
        self.synced.append(os.path.relpath(path, self._root))
        await super().sync_directory(path)


async def test_posix_2_what_stays_is_synced_once_and_the_rest_every_time(root: Path) -> None:
    disk = Watched(root)
    synced, store = disk.synced, PosixStore(root, disk)
    await store.put("t/a/outcome", b"")
    assert synced[:4] == ["t/a", "t", ".", ".."]
    assert Path(root, synced[-1]).resolve() == Path("/")
    for key, expected in (
        ("t/a/vote", ["t/a", "t", "."]),
        (".checkpointd/starts/1", [".checkpointd/starts", ".checkpointd", "."]),
        (".checkpointd/starts/2", [".checkpointd/starts"]),
        ("latest", ["."]),
    ):
        synced.clear()
        await store.put(key, b"")
        assert synced == expected


async def test_posix_2_a_root_that_is_another_one_has_its_names_synced_again(root: Path) -> None:
    """Seen where the root's identity is asked for, and said by `forget_synced`, as an inode's number may be given again."""
    disk = Watched(root)
    synced, store = disk.synced, PosixStore(root, disk)
    await store.put(".checkpointd/starts/1", b"")
    await store.identity(".checkpointd/starts/1")
    root.rename(root.with_name("aside"))
    async with PosixStore(root) as other:
        await other.put(".checkpointd/starts/1", b"")
    await store.identity(".checkpointd/starts/1")
    for _ in range(2):
        synced.clear()
        await store.put(".checkpointd/shown/2", b"")
        assert synced[:4] == [".checkpointd/shown", ".checkpointd", ".", ".."]
        assert Path(root, synced[-1]).resolve() == Path("/")
        store.forget_synced()


async def test_posix_2_a_sync_that_failed_is_not_remembered(root: Path) -> None:
    failing = True

    class Failing(OsDisk):
        async def sync_directory(self, path: str) -> None:
            if failing and path == str(root):
                raise OSError(5, "Input/output error")
            await super().sync_directory(path)

    store = PosixStore(root, Failing())
    key = ".checkpointd/starts/1"
    for _ in range(2):
        with pytest.raises(StoreError, match="EIO"):
            await store.put(key, b"")
        with pytest.raises(StoreError, match="EIO"):
            await store.put_if_absent(key, b"")
    failing = False
    assert await store.put_if_absent(key, b"") is False


async def test_directories_above_that_cannot_be_opened_do_not_matter(root: Path) -> None:
    class Closed(OsDisk):
        async def sync_directory(self, path: str) -> None:
            if path in {"/", str(root.parent)}:
                raise PermissionError(13, "Permission denied")
            await super().sync_directory(path)

    root.mkdir()
    await PosixStore(root, Closed()).put("a", b"")


async def test_but_one_that_this_store_made_must_be_durable(root: Path) -> None:
    class Closed(OsDisk):
        async def sync_directory(self, path: str) -> None:
            if path == str(root.parent):
                raise PermissionError(13, "Permission denied")
            await super().sync_directory(path)

    with pytest.raises(StoreError, match="EACCES"):
        await PosixStore(root, Closed()).put("a", b"")


async def test_a_temporary_file_that_could_not_be_removed_goes_with_the_next_one(root: Path) -> None:
    """The file system became read-only for a moment, say."""
    failing = True

    class ReadOnly(OsDisk):
        async def unlink(self, path: str) -> None:
            if failing:
                raise OSError(30, "Read-only file system")
            await super().unlink(path)

    store = PosixStore(root, ReadOnly())
    temporary = root / ".checkpointd" / "tmp"
    await store.put_if_absent("a", b"")
    await store.put_if_absent("b", b"")
    assert len([*temporary.iterdir()]) == 2
    failing = False
    await store.put_if_absent("c", b"")
    assert not [*temporary.iterdir()]


# --- large objects ---


async def test_a_write_that_was_interrupted_spoils_the_object(store: PosixStore) -> None:
    writer = await store.open_writer("t/large")
    task = asyncio.create_task(writer.write_at(0, bytes(1024)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(StoreError, match="lost"):
        await writer.finish(1024)
    await writer.discard()
    assert await store.stat("t/large") is None


async def test_discard_never_raises(root: Path) -> None:
    class Broken(OsDisk):
        async def unlink(self, path: str) -> None:
            raise OSError(5, "Input/output error")

    writer = await PosixStore(root, Broken()).open_writer("t/large")
    await writer.discard()
    await writer.discard()


async def test_a_reserve_that_fails_leaves_nothing_open(root: Path) -> None:
    class Full(OsDisk):
        async def create(self, path: str) -> WritableFile:
            file = await super().create(path)

            async def reserve(size: int) -> None:
                raise OSError(28, "No space left on device")

            file.reserve = reserve  # type: ignore[method-assign]
            return file

    store = PosixStore(root, Full())
    with pytest.raises(StoreError, match="ENOSPC"):
        await store.open_writer("t/large", size_hint=1)
    assert await store.stat("t/large") is None
    opened = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [name for name in opened if name.startswith(str(root))]


async def test_concurrent_stores_at_one_root_share_the_lock(root: Path) -> None:
    stores = [PosixStore(root) for _ in range(6)]
    await stores[0].put("counter", b"0")

    async def count_up(store: Store) -> None:
        for _ in range(5):
            while True:
                seen = await store.get("counter")
                if await store.put_if_match("counter", seen, str(int(seen) + 1).encode()):
                    break

    await asyncio.gather(*map(count_up, stores))
    assert await stores[0].get("counter") == b"30"
