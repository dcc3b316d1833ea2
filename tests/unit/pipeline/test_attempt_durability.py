"""What a save and a removal make durable, and how often. `tests/simulation/test_job_mutations.py` guards the order."""

from __future__ import annotations

from pathlib import Path

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


def _at(log: list[tuple[str, str]], what: str, end: str) -> int:
    return next(i for i, (kind, path) in enumerate(log) if kind == what and path.endswith(end))


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
