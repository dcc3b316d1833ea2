"""An export to a bucket at every crash point: a program finds the whole model of one checkpoint there, or none, and the next
process finishes the work. Retention leaves what is exported as long as the exporter lives, and not longer.

BUCKETOUT-1, BUCKETOUT-3, EXPORT-2, EXPORT-5 and EXPORTHOLD-1 of `export/`, EXPORTLEASE-1 and EXPORTLEASE-2 of
`pipeline/gc/export_leases.py`; each mutation leaves a step out, and must be caught.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig
from checkpointd.errors import StoreError
from checkpointd.export import bucket_output
from checkpointd.export.own_lease import OwnExportLease
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.uploads import unfinished_uploads_of
from checkpointd.testing.crashpoints import Crash, Scenario, every_crash_point
from checkpointd.testing.simbucket import SimBucket, SimClient
from checkpointd.testing.simloop import Process
from checkpointd.testing.simstorage import Effect, SimStorage
from tests.unit.export.exported_roots import CONFIG, check_exported, files_at, is_model_of, save, tags_at, to_bucket, weights_in

pytestmark = pytest.mark.timeout(600)

TAG = "best"
SHARD_BYTES = 1500


@pytest.fixture
def files(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_bytes(CONFIG)
    (tmp_path / "vocab.json").write_text("{}")
    return str(tmp_path)


def kill(storage: SimStorage, effect: Effect) -> None:
    storage.kill(effect.process)


def spawn(bucket: SimBucket, name: str, root: Store, files: str, shard_bytes: int) -> asyncio.Task[None]:
    """One look of a daemon, which exports what is due and leaves."""
    client = bucket.process(name)
    sight = Sight(process=name, life=lambda other: "running" if other in bucket.alive() else "ended")
    one = to_bucket(root, ObjectStore(client), sight=sight, files=files, max_shard_size=shard_bytes, keep_last=1)

    async def run() -> None:
        assert await one.round()
        await one.close()

    return client.process.spawn(run())


async def one_model_or_none(store: Store, steps: Sequence[int]) -> None:
    for tag in await tags_at(store):
        files = await files_at(store, tag)
        found = weights_in(files)
        assert found is None or any(is_model_of(step, found) for step in steps), f"{tag} holds a mixture"
        assert found is None or "vocab.json" in files, f"{tag} has no vocabulary yet"


async def finished(store: Store, tag: str) -> None:
    """Step 2 is exported as `tag`, and nothing else is there."""
    await check_exported(store, 2, tag)
    assert await tags_at(store) == [tag]
    assert await unfinished_uploads_of(store) == []


def struck(files: str, *, shards: tuple[int, int] = (SHARD_BYTES, SHARD_BYTES), again: bool = True) -> Scenario:
    """Step 1 is exported; the export of step 2 is struck. `again`: it has the same tag, so it takes the place of the first."""

    async def scenario(crash: Crash) -> bool:
        root, bucket = MemoryStore("root"), SimBucket()
        await save(root, 1, tag=TAG)
        await spawn(bucket, "first", root, files, shards[0])
        await save(root, 2, tag=TAG if again else "other", k=1 if again else 0)
        was_struck = await crash.strikes(bucket, [spawn(bucket, "second", root, files, shards[1])])
        bucket.after = lambda *_: None
        client, tag = bucket.process("reader"), TAG if again else "other"
        reader = ObjectStore(client)
        await client.process.spawn(one_model_or_none(reader, (1, 2)))
        await spawn(bucket, "third", root, files, shards[1])
        await client.process.spawn(finished(reader, tag))
        return was_struck

    return scenario


@pytest.mark.parametrize(
    ("shards", "again"),
    [
        ((SHARD_BYTES, SHARD_BYTES), False),
        ((SHARD_BYTES, SHARD_BYTES), True),
        ((SHARD_BYTES, 10**6), True),
        ((10**6, SHARD_BYTES), True),
    ],
)
def test_bucketout_1_a_kill_at_every_effect(files: str, shards: tuple[int, int], again: bool) -> None:
    assert every_crash_point(struck(files, shards=shards, again=again), range(1), kill) > 8


# --- retention beside it -------------------------------------------------------------------------------------------------

LOOK_S = 600.0
"""Between two removals: a job removes after its saves."""
OLDEST = {"removed": 1}
"""Of three checkpoints that are due, two stay for the export, and one goes before its turn."""


class Retiring:
    """A job of another machine at the root: it keeps the newest checkpoint alone."""

    def __init__(self, root: SimBucket) -> None:
        self.bucket, client = root, root.process("job")
        self.process, self.store = client.process, ObjectStore(client)
        self._tidier = Tidier(self.store, CommitConfig(retention=Retention(keep_last=1)))

    async def saves(self, *steps: int) -> None:
        await self.process.spawn(save(self.store, *steps, dedup=False))

    async def removes(self) -> list[str]:
        """Remove what no rule keeps; the tags that stay, newest first."""
        return await self.process.spawn(self._removed())

    async def _removed(self) -> list[str]:
        start = await starts.newest(self.store)
        await self._tidier.tidy(AttemptInfo(tag=TAG, attempt=AttemptId(start, 0), rank=0, world_size=1, step=0, n=0))
        return [checkpoint.tag for checkpoint in await root_view.checkpoints(self.store)]


def exporting_beside(job: Retiring, place: SimBucket, process: Process, files: str, left: dict[str, int]) -> asyncio.Task[None]:
    """A daemon that exports all that is due, while the job removes before every batch. `left`: what it then cannot export."""
    sight = Sight(process=process.name, life=lambda other: "running" if other == process.name else "ended")
    root, to = (ObjectStore(SimClient(bucket, process)) for bucket in (job.bucket, place))
    one = to_bucket(root, to, sight=sight, files=files)

    async def turn(_: int) -> None:
        assert one.progress.tag in await job.removes()

    async def run() -> None:
        one._turn = turn
        assert await one.round()
        assert one.progress.left == left
        await one.close()

    return process.spawn(run())


def struck_beside_retention(files: str, *, at_root: bool) -> Scenario:
    """Of three checkpoints, the newest stays by rule; the exporter is killed at an effect at the root, or at its place."""

    async def scenario(crash: Crash) -> bool:
        root, to = SimBucket(), SimBucket()
        job = Retiring(root)
        await job.saves(1, 2, 3)
        struck = root if at_root else to
        was_struck = await crash.strikes(struck, [exporting_beside(job, to, struck.process("first").process, files, OLDEST)])
        root.after = to.after = lambda *_: None
        await job.removes()
        await asyncio.sleep(LOOK_S)
        assert await job.removes() == ["global_step3"], "the lease of a killed exporter keeps a checkpoint for ever"
        await exporting_beside(job, to, struck.process("second").process, files, {})
        client = to.process("reader")
        store = ObjectStore(client)
        await client.process.spawn(check_exported(store, 3))
        if not was_struck:
            assert await client.process.spawn(tags_at(store)) == ["global_step2", "global_step3"]
        return was_struck

    return scenario


def kill_of(files: str, *, at_root: bool) -> int:
    """Kill the exporter, whichever process the effect is of: the job has effects at the root, too."""

    def how(storage: SimStorage, _: Effect) -> None:
        storage.kill("first")

    return every_crash_point(struck_beside_retention(files, at_root=at_root), range(1), how)


@pytest.mark.parametrize("at_root", [True, False])
def test_export_5_what_is_exported_stays_until_the_exporter_has_ended_or_died(files: str, at_root: bool) -> None:
    assert kill_of(files, at_root=at_root) > 8


def keeps_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        return

    monkeypatch.setattr(OwnExportLease, "keep", nothing)


def trusts_leases_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExportLeases, "_has_ended", lambda *_: False)


@pytest.mark.parametrize("mutation", [keeps_no_lease, trusts_leases_for_ever])
def test_retention_beside_an_export_without_a_step_is_caught(
    files: str, mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, StoreError)):
        kill_of(files, at_root=True)


# --- mutations -----------------------------------------------------------------------------------------------------------


def in_order_of_names(names: dict[str, bytes]) -> list[str]:
    return sorted(names)


def replaces_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object, **__: object) -> None:
        return

    monkeypatch.setattr(bucket_output, "removed", nothing)


def index_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_output, "in_order", in_order_of_names)


@pytest.mark.parametrize("mutation", [replaces_without_a_word, index_first])
def test_an_export_without_a_step_is_caught(
    files: str, mutation: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, StoreError)):  # what is there, or an object in the way
        every_crash_point(struck(files), range(1), kill)
