"""The order in which a save makes its objects durable and visible."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.pipeline.gc.collect import remove, sweep
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.disk import WritableFile
from checkpointd.store.posix.osdisk import OsDisk
from checkpointd.store.posix.store import PosixStore
from tests.builders import leave_in_doubt, save_checkpoint


class RecordingFile:
    """Passes through, noting what is synced."""

    def __init__(self, inner: WritableFile, path: str, log: list[tuple[str, str]]) -> None:
        self._inner, self._path, self._log = inner, path, log

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    async def sync(self) -> None:
        await self._inner.sync()
        self._log.append(("sync", self._path))


class RecordingDisk(OsDisk):
    """A real disk that keeps the order of what makes things durable and visible."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[str, str]] = []

    async def create(self, path: str) -> WritableFile:
        self.log.append(("create", path))
        return RecordingFile(await super().create(path), path, self.log)  # type: ignore[return-value]  # by __getattr__

    async def sync_directory(self, path: str) -> None:
        await super().sync_directory(path)
        self.log.append(("sync directory", path))

    async def link(self, source: str, target: str) -> None:
        assert target.endswith(".vote") == (("sync", source) not in self.log)  # PERSIST-7
        await super().link(source, target)
        self.log.append(("link", target))

    async def rename(self, source: str, target: str) -> None:
        assert ("sync", source) in self.log
        await super().rename(source, target)
        self.log.append(("rename", target))


@pytest.fixture
def recording(tmp_path: Path) -> tuple[PosixStore, RecordingDisk]:
    disk = RecordingDisk()
    return PosixStore(tmp_path / "root", disk), disk


def _at(log: list[tuple[str, str]], what: str, end: str) -> int:
    return next(i for i, (kind, path) in enumerate(log) if kind == what and path.endswith(end))


async def test_files_and_directories_are_synced_before_anything_refers_to_them(
    recording: tuple[PosixStore, RecordingDisk],
) -> None:
    store, disk = recording
    await save_checkpoint(store, tag="global_step1", world_size=1)
    log = disk.log
    chunks_synced, index, vote = (
        _at(log, "sync", "00000-0.chunks"),
        _at(log, "link", "00000.index"),
        _at(log, "link", "00000.vote"),
    )
    ballot = next(i for i, (kind, path) in enumerate(log) if kind == "link" and "/ballot-" in path)
    commit = next(i for i, (kind, path) in enumerate(log) if i > ballot and kind == "link" and path.endswith(".json"))
    attempt = log[vote][1].rsplit("/", 1)[0]
    synced = [i for i, (kind, path) in enumerate(log) if kind == "sync directory" and path == attempt]
    assert chunks_synced < index < vote < ballot < commit
    for before, after in ((chunks_synced, index), (index, vote), (ballot, commit)):
        assert any(before < i < after for i in synced), log[before : after + 1]
    for parent in (attempt.rsplit("/", 1)[0], attempt.rsplit("/", 2)[0]):
        assert any(i < vote for i, entry in enumerate(log) if entry == ("sync directory", parent)), parent


async def test_latest_moves_after_the_commit_is_durable_and_in_one_piece(
    recording: tuple[PosixStore, RecordingDisk],
) -> None:
    store, disk = recording
    await save_checkpoint(store, tag="global_step1", world_size=1)
    log = disk.log
    commit = next(i for i, (kind, path) in reversed([*enumerate(log)]) if kind == "link" and path.endswith(".json"))
    latest = next(i for i, (kind, path) in enumerate(log) if kind in {"link", "rename"} and path.endswith("/latest"))
    entries = log[commit][1].rsplit("/", 1)[0]
    assert any(commit < i < latest for i, entry in enumerate(log) if entry == ("sync directory", entries))
    assert ("create", log[latest][1]) not in log  # never written in place


async def test_attempt_8_nothing_is_put_before_the_announcement_is_durable(recording: tuple[PosixStore, RecordingDisk]) -> None:
    store, disk = recording
    await save_checkpoint(store, tag="global_step1", world_size=1)
    paths = [path for _, path in disk.log]
    entries = [i for i, (kind, path) in enumerate(disk.log) if kind == "link" and path.endswith(".json")]
    first = next(i for i, path in enumerate(paths) if "/global_step1/" in path)
    begun, announced, committed = entries
    synced = [i for i, (kind, path) in enumerate(disk.log) if kind == "sync directory" and path.endswith("/log")]
    assert begun < announced < first < committed
    assert any(announced < i < first for i in synced)


async def test_log_9_what_the_coordinator_syncs_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    counts = []
    for world_size in (2, 5):
        disk = RecordingDisk()
        store = PosixStore(tmp_path / f"root{world_size}", disk)
        save = await leave_in_doubt(store, voting=tuple(range(1, world_size)), world_size=world_size)
        disk.log.clear()
        assert (await save.run(0)).phase is Phase.COMMITTED
        counts.append(sum(kind.startswith("sync") for kind, _ in disk.log))
    assert counts[0] == counts[1] > 0


async def test_persist_7_a_vote_needs_no_sync(tmp_path: Path) -> None:
    """The last sync of a rank that is not the coordinator comes before its vote."""
    disk = RecordingDisk()
    store = PosixStore(tmp_path / "root", disk)
    await leave_in_doubt(store, voting=(1,), world_size=2)
    vote = _at(disk.log, "link", "00001.vote")
    assert any(kind == "sync directory" for kind, _ in disk.log[:vote])
    assert not any(kind.startswith("sync") for kind, _ in disk.log[vote:])


async def test_what_a_removal_syncs_does_not_grow_with_the_ranks(tmp_path: Path) -> None:
    """Each directory is synced once, after its last object went."""
    counts = []
    for world_size in (2, 5):
        disk = RecordingDisk()
        store = PosixStore(tmp_path / f"root{world_size}", disk)
        await save_checkpoint(store, tag="global_step1", world_size=world_size)
        disk.log.clear()
        assert await remove(store, {"unneeded": ["global_step1/00000001-0"]}) == ""
        await sweep(store)
        assert await root_view.checkpoints(store) == []
        counts.append(sum(kind.startswith("sync") for kind, _ in disk.log))
    assert counts[0] == counts[1] > 0
