"""Collection with references: MARK-1 to MARK-3 of pipeline/root/marks.py, COLLECT-5 and COLLECT-6 of
pipeline/gc/collect.py; crashes are simulated.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from checkpointd.admin.gc import collection, deletion
from checkpointd.commit import garbage
from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, LoadConfig
from checkpointd.errors import DamagedError, NotFoundError, StagingError, StoreError, UnreadableError, UsageError
from checkpointd.layout import keys
from checkpointd.layout.catalog_records import CatalogRecord, CatalogState, batch_key
from checkpointd.layout.keys import VERIFIED, AttemptId, chunks_name, mark_name
from checkpointd.layout.manifest import Deleted, decode
from checkpointd.pipeline.gc import collect as collecting
from checkpointd.pipeline.gc.collect import collect
from checkpointd.pipeline.gc.retire import retire_tag
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import CheckpointVerdict, Damage, record_verdict, verify
from checkpointd.pipeline.root import catalog, starts
from checkpointd.pipeline.root.catalog_log import CatalogLog, record_of
from checkpointd.pipeline.root.marks import condemn, references, standing_mark
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.pipeline.root.wholeness import Wholeness
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.write.dedup import Base, Bases
from checkpointd.report.votes import votes_of
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import Arrays, leave_in_doubt, load_arrays, phases, plan_save, save_checkpoint

FIRST = "global_step1/00000001-0"


def state(step: int, frozen: int = 0) -> Arrays:
    """A frozen tensor, encoded apart from the one that moves: it lies in an object of its own only where codecs differ."""
    return {"frozen": np.arange(frozen, frozen + 3000, dtype=np.int32), "moving": np.full(2000, step, dtype=np.float32)}


async def saved(store: Store, *steps: int, frozen: int = 0, world_size: int = 1, **options: object) -> None:
    for step in steps:
        arrays = state(step, frozen)
        attempts = await save_checkpoint(
            store,
            **{
                "tag": f"global_step{step}",
                "step": step,
                "world_size": world_size,
                "dedup": True,
                "tensors": lambda _, arrays=arrays: arrays,
                **options,
            },
        )
        assert phases(attempts) == [Phase.COMMITTED] * world_size


async def names(store: Store, prefix: str) -> list[str]:
    return [entry.name for entry in await store.list(prefix)]


async def loads(store: Store, step: int, frozen: int = 0) -> None:
    expected: Mapping[str, bytes] = {fqn: array.tobytes() for fqn, array in state(step, frozen).items()}
    assert await load_arrays(store, f"global_step{step}", 0) == expected
    assert (await verify(store, await catalog.find(store, f"global_step{step}"), LoadConfig())).whole


async def tags(store: Store) -> list[str]:
    return [c.tag for c in await catalog.checkpoints(store)]


def listed(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


async def test_what_a_newer_checkpoint_refers_to_stays_and_goes_with_it() -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    report = await collection(store, Retention(keep_last=1), dry_run=False)
    assert report.retired == ("global_step1",)
    assert report.removed[0].objects == ("00000.index", "ballot")
    assert await tags(store) == ["global_step2"]
    assert "00000-0.chunks" in await names(store, FIRST)
    await loads(store, 2)
    await saved(store, 3, frozen=9)  # which refers to nothing
    await read_back(store, await catalog.find(store, "global_step3"))
    would = await collection(store, Retention(keep_last=1), dry_run=True)
    done = await collection(store, Retention(keep_last=1), dry_run=False)
    assert would.removed == done.removed
    assert {removed.tag for removed in done.removed} == {"global_step1", "global_step2"}
    assert await names(store, FIRST) == ["00000.vote", "deleted", mark_name(1), "outcome"]
    await loads(store, 3, frozen=9)


async def test_new_saves_go_on_to_refer_to_what_a_removed_checkpoint_keeps() -> None:
    store = MemoryStore()
    for step in range(1, 6):
        await saved(store, step)
        await collection(store, Retention(keep_last=1), dry_run=False)
    assert await references(store, {FIRST}) == {f"{FIRST}/00000-0.chunks"}
    await loads(store, 5)


async def test_a_tag_that_is_saved_again_refers_to_its_own_older_attempt() -> None:
    store = MemoryStore()
    for step in (1, 2, 3):
        await saved(store, step, tag="best", k=step - 1)
    await read_back(store, await catalog.find(store, "best"))  # else the one before it stays, which was
    await retire_tag(store, "best", 1)
    assert await references(store, {"best/00000001-0"}) == {"best/00000001-0/00000-0.chunks"}
    assert (await verify(store, await catalog.find(store, "best"), LoadConfig())).whole
    assert await names(store, "best/00000001-1") == ["00000.vote", "deleted", "outcome"]


async def test_what_an_undecided_attempt_refers_to_stays() -> None:
    store = MemoryStore()
    await saved(store, 1)
    await leave_in_doubt(store, voting=(0,), tag="global_step2", world_size=1, dedup=True, tensors=lambda _: state(2))
    await saved(store, 3, frozen=9)
    await collection(store, Retention(keep_last=1), dry_run=False)
    assert "00000-0.chunks" in await names(store, FIRST)


async def test_collect_6_what_cannot_be_told_removes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    await leave_in_doubt(store, voting=(0,), tag="global_step3", world_size=1, tensors=lambda _: state(3))
    await store.put("global_step3/00000001-0/00000.index", b"nonsense")
    report = await collection(store, Retention(keep_last=1), dry_run=False)
    assert not report.removed
    assert "it is not known which are still needed" in caplog.text
    await loads(store, 2)


async def test_a_dry_run_says_what_would_go_and_writes_nothing(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    await saved(store, 1, 2, 3)
    before = listed(tmp_path)
    would = await collection(store, Retention(keep_last=1), dry_run=True)
    assert listed(tmp_path) == before
    did = await collection(store, Retention(keep_last=1), dry_run=False)
    assert (would.retired, would.removed, would.freed_bytes) == (did.retired, did.removed, did.freed_bytes)
    assert would.kept_bytes > 0


async def test_mark_2_a_later_mark_keeps_less_and_never_more() -> None:
    store = MemoryStore()
    await saved(store, 1)
    await condemn(store, FIRST, "the test", {f"{FIRST}/00000-0.chunks"})
    for needed, kept in ((f"{FIRST}/00000-0.chunks", ("00000-0.chunks",)), ("", ()), (f"{FIRST}/00000-0.chunks", ())):
        await condemn(store, FIRST, "again", {needed})
        mark = await standing_mark(store, FIRST, await names(store, FIRST))
        assert mark is not None
        assert (mark.kept, mark.reason) == (kept, "the test")
    assert [name for name in await names(store, FIRST) if name.startswith("deleted")] == ["deleted", "deleted-1"]


async def test_collect_7_a_mark_put_after_the_look_removes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a collector's look and its sweep a save refers to what another collector condemns only then."""
    store, key = MemoryStore(), f"{FIRST}/00000-0.chunks"
    await saved(store, 1, 2)
    second = await catalog.find(store, "global_step2")
    base = Base.of(await read_index(store, second, 0), second.outcome.order)
    await saved(store, 3, frozen=9)  # which refers to nothing
    await deletion(store, "global_step1", force=False, dry_run=False)
    looks: list[frozenset[str]] = []

    async def superseded(bases: Bases, info: AttemptInfo) -> Base:
        return base

    async def look(store: Store, holders: Collection[str], without: Collection[str] = (), **_: object) -> frozenset[str]:
        looks.append(await references(store, holders, without))
        if len(looks) == 1:
            await collecting.note(store, record_of("removing", "global_step2", "00000001-0"))
            await condemn(store, "global_step2/00000001-0", "the other collector", ())
        else:
            await leave_in_doubt(store, voting=(0,), tag="global_step4", world_size=1, dedup=True, tensors=lambda _: state(4))
            await condemn(store, FIRST, "the other collector", ())
        return looks[-1]

    monkeypatch.setattr(Bases, "newest", superseded)
    monkeypatch.setattr(collecting, "references", look)
    first = next(view.facts for view in await catalog.scan(store) if view.prefix == FIRST)
    await collect(store, [first])
    assert [key in found for found in looks] == [True, False]
    assert key in await references(store, {FIRST})
    assert "00000-0.chunks" in await names(store, FIRST)


async def test_mark_3_a_mark_that_cannot_be_read_frees_nothing_and_is_followed_by_one_that_keeps_nothing() -> None:
    store = MemoryStore()
    await saved(store, 1)
    await store.put(f"{FIRST}/deleted", b"nonsense")
    await condemn(store, FIRST, "the test", {f"{FIRST}/00000-0.chunks"})
    mark = decode(await store.get(f"{FIRST}/deleted-1"), Deleted, "")
    assert mark.kept == ()


async def test_only_ballots_of_checkpoints_that_refer_to_an_attempt_which_loses_objects_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, read = MemoryStore(), list[str]()
    await saved(store, 1, 2, 3)
    await saved(store, 4, frozen=9)  # which refers to nothing
    get = store.get

    async def noted(key: str, **options: int) -> bytes:
        read.append(key)
        return await get(key, **options)

    monkeypatch.setattr(store, "get", noted)
    outcomes = {tag: (await catalog.find(store, tag)).outcome for tag in ("global_step1", "global_step2", "global_step4")}
    assert [outcome.holders for outcome in outcomes.values()] == [(), (FIRST,), ()]
    read.clear()
    assert await references(store, {FIRST}) == {f"{FIRST}/00000-0.chunks"}
    assert [key for key in read if key.endswith("ballot")] == [f"global_step{n}/00000001-0/ballot" for n in (2, 3)]
    assert await references(store, {FIRST}, {f"global_step{n}/00000001-0" for n in (2, 3)}) == frozenset()
    read.clear()
    assert await references(store, {"global_step4/00000001-0"}) == frozenset()
    assert not [key for key in read if key.endswith("ballot")]


async def test_collect_6_a_ballot_that_cannot_be_verified_frees_nothing() -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    await store.put("global_step2/00000001-0/ballot", b"scribble")
    with pytest.raises(DamagedError, match=r"global_step2/00000001-0/ballot"):
        await references(store, {FIRST})


async def test_the_objects_of_each_group_of_ranks_lie_in_a_directory_of_their_own_and_go_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "RANKS_PER_GROUP", 2)
    store, attempt = PosixStore(tmp_path), tmp_path / FIRST
    await saved(store, 1, 2, world_size=5)
    assert {path.name: sorted(one.name for one in path.iterdir()) for path in attempt.iterdir() if path.is_dir()} == {
        "1": ["00002-0.chunks", "00002.index", "00002.vote", "00003-0.chunks", "00003.index", "00003.vote"],
        "2": ["00004-0.chunks", "00004.index", "00004.vote"],
    }
    assert (await verify(store, await catalog.find(store, "global_step2"), LoadConfig())).whole
    (attempt / "2" / "00001.vote").write_bytes(b"of a rank of another group")
    view = await catalog.view(store, "global_step1", AttemptId(1, 0))
    assert view.sizes["00001.vote"] == (attempt / "00001.vote").stat().st_size
    (attempt / "2" / "00001.vote").unlink()
    needed = {f"{FIRST}/00000-0.chunks", f"{FIRST}/00001-0.chunks", f"{FIRST}/2/00004-0.chunks"}
    assert await references(store, {FIRST}) == needed | {f"{FIRST}/1/0000{rank}-0.chunks" for rank in (2, 3)}
    await collection(store, Retention(keep_last=1), dry_run=False)
    assert sorted(one.name for one in (attempt / "2").iterdir()) == ["00004-0.chunks", "00004.vote"]
    assert (await verify(store, await catalog.find(store, "global_step2"), LoadConfig())).whole
    whole = Wholeness(store, await catalog.scan(store))
    second = await catalog.view(store, "global_step2", AttemptId(1, 0))
    assert await whole.lost(second, await votes_of(store, second)) == ()
    (attempt / "2" / "00004-0.chunks").unlink()
    whole = Wholeness(store, await catalog.scan(store))
    assert [one.key for one in await whole.lost(second, await votes_of(store, second))] == [f"{FIRST}/2/00004-0.chunks"]
    await saved(store, 3, frozen=9, world_size=5)
    await read_back(store, await catalog.find(store, "global_step3"))
    await collection(store, Retention(keep_last=1), dry_run=False)
    left = {str(path.relative_to(tmp_path)) for path in (tmp_path / "global_step2").rglob("*.index")}
    assert not left


# --- retention ----------------------------------------------------------------------------------------------------


async def test_the_coordinator_applies_retention_after_a_commit() -> None:
    store = MemoryStore()
    await saved(store, 1, 2, 3, 4, world_size=2, retention=Retention(keep_last=2))
    assert await tags(store) == ["global_step4", "global_step3"]
    await loads(store, 4)


async def test_the_best_by_a_metric_stays() -> None:
    store, rules = MemoryStore(), Retention(keep_last=1, best=1, metric="loss")
    for step, loss in enumerate((3.0, 1.0, 2.0, 4.0), 1):
        await saved(store, step, metrics={"loss": loss}, retention=rules)
    assert await tags(store) == ["global_step4", "global_step2"]
    assert (await catalog.find(store, "global_step2")).outcome.metrics == {"loss": 1.0}


async def test_the_last_verified_one_stays() -> None:
    store = MemoryStore()
    await saved(store, 1, 2, 3)
    found = await catalog.find(store, "global_step2")
    await record_verdict(store, found, await verify(store, found, LoadConfig()))
    await collection(store, Retention(keep_last=1), dry_run=False)
    assert await tags(store) == ["global_step3", "global_step2"]


async def test_one_that_was_verified_and_is_damaged_now_is_not_kept_for_it() -> None:
    """Else retention would keep it instead of the last one that is whole."""
    store = MemoryStore()
    await saved(store, 1, 2, 3, frozen=9, dedup=False)
    for step in (1, 2):
        found = await catalog.find(store, f"global_step{step}")
        await record_verdict(store, found, await verify(store, found, LoadConfig()))
    await store.delete(f"{found.prefix}/00000.index")
    await record_verdict(store, found, await verify(store, found, LoadConfig()))
    await collection(store, Retention(keep_last=1), dry_run=False)
    assert await tags(store) == ["global_step3", "global_step1"]


async def test_what_cannot_be_read_just_now_says_nothing_of_a_verified_one() -> None:
    store = MemoryStore()
    await saved(store, 1)
    found = await catalog.find(store, "global_step1")
    await record_verdict(store, found, await verify(store, found, LoadConfig()))
    away = Damage.of(UnreadableError("I/O error"), 0)
    await record_verdict(store, found, CheckpointVerdict(found.tag, str(found.attempt), unreadable=[away]))
    assert VERIFIED in await names(store, found.prefix)


async def test_collect_5_an_older_starts_coordinator_removes_nothing() -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    await starts.take(store, 1)
    save = await plan_save(store, tag="global_step2", start=1)
    await Tidier(store, CommitConfig(retention=Retention(keep_last=1))).tidy(save.info(0))
    await retire_tag(store, "global_step2", 1)
    assert await tags(store) == ["global_step2", "global_step1"]


async def test_tidy_5_nothing_is_removed_from_a_copy_in_the_roots_place(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    root.mkdir()
    async with PosixStore(root) as store:
        await saved(store, 1, 2)
        save, own = await plan_save(store, tag="global_step2"), OwnRoot(store)
        await own.begun(1, (await starts.read(store, 1)).nonce)
        tidier = Tidier(store, CommitConfig(retention=Retention(keep_last=1)), own.check)
        root.rename(away)
        shutil.copytree(away, root)
        await tidier.tidy(save.info(0))
        assert await tags(store) == ["global_step2", "global_step1"]
        shutil.rmtree(root)
        away.rename(root)
        await tidier.tidy(save.info(0))
        assert await tags(store) == ["global_step2"]


async def test_records_of_removed_checkpoints_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "ROOT_RECORDS_KEPT", 2)
    store = MemoryStore()
    for step in range(1, 8):
        await saved(store, step, frozen=step, retention=Retention(keep_last=1))
    views = [view for view in await catalog.scan(store) if view.sizes]
    assert [view.tag for view in views if view.state == "deleted"] in (
        ["global_step5", "global_step6"],
        ["global_step4", "global_step5", "global_step6"],
    )


async def aborted(store: Store, steps: range) -> None:
    for step in steps:
        failing = {0: StagingError("torn")}
        await save_checkpoint(store, tag=f"global_step{step}", step=step, world_size=1, failing=failing)


async def test_collect_8_older_aborted_attempts_are_forgotten_and_the_catalog_forgets_them_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "ABORTED_KEPT", 2)
    store = MemoryStore()
    await aborted(store, range(1, 7))
    await collection(store, Retention(), dry_run=False)
    assert [view.tag for view in await catalog.look_everywhere(store)] == ["global_step5", "global_step6"]
    known = CatalogLog(store)
    await known.refresh()
    assert [entry.tag for entry in known.state.entries.values()] == ["global_step5", "global_step6"]


async def test_a_removal_that_is_cancelled_begins_nothing_more() -> None:
    """Who closes a Checkpointer waits for it."""

    class Slow(MemoryStore):
        begun = 0

        async def delete(self, key: str, *, durable: bool = True) -> None:
            self.begun += 1
            await asyncio.sleep(0)
            await super().delete(key, durable=durable)

    store = Slow()
    await aborted(store, range(1, 3))
    for step, n in itertools.product((1, 2), range(100)):
        await store.put(f"global_step{step}/00000001-0/{chunks_name(0, n)}", b"put late")
    before = store.begun
    removal = asyncio.create_task(collection(store, Retention(), dry_run=False))
    while store.begun == before:
        await asyncio.sleep(0)
    begun = store.begun
    removal.cancel()
    with pytest.raises(asyncio.CancelledError):
        await removal
    assert store.begun == begun


class Stubborn(MemoryStore):
    """Removes no object below the prefix `stays`."""

    stays: str | None = None

    async def delete(self, key: str, *, durable: bool = True) -> None:
        if self.stays is not None and key.startswith(self.stays):
            raise StoreError(f"deleting {key!r} failed: Permission denied")
        await super().delete(key, durable=durable)


@pytest.mark.parametrize("stays", ["an aborted attempt", "a replaced checkpoint", "a forgotten attempt"])
async def test_an_attempt_that_cannot_be_removed_keeps_no_other_from_it(
    stays: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, aborted_one = Stubborn(), "global_step2/00000001-0"
    await saved(store, 1)
    await aborted(store, range(2, 3))
    if stays == "a forgotten attempt":
        monkeypatch.setattr(garbage, "ABORTED_KEPT", 0)
    else:
        await store.put(f"{aborted_one}/{chunks_name(0, 0)}", b"put late")
    for step in (3, 4, 5):
        await saved(store, step, frozen=step)
    store.stays = FIRST if stays == "a replaced checkpoint" else aborted_one
    with pytest.raises(StoreError, match="Permission denied"):
        await collection(store, Retention(keep_last=1), dry_run=False)
    assert [c.tag for c in await catalog.checkpoints(store)] == ["global_step5"]
    await saved(store, 6, frozen=6, retention=Retention(keep_last=1))
    # The one before the newest stays until that was read back.
    assert [c.tag for c in await catalog.checkpoints(store)] == ["global_step6", "global_step5"]
    assert "could not be removed: deleting" in caplog.text
    assert {key.partition("/")[0] for key in await bulk(store)} == {"global_step6", "global_step5", *LEFT[stays]}
    assert await store.list(store.stays)
    store.stays = None
    await saved(store, 7, frozen=7, retention=Retention(keep_last=1))
    assert {key.partition("/")[0] for key in await bulk(store)} <= {"global_step7", "global_step6", "global_step5"}


LEFT = {
    "an aborted attempt": ["global_step2"],
    "a replaced checkpoint": ["global_step1"],
    "a forgotten attempt": [],
}


async def bulk(store: Store) -> list[str]:
    """The keys of all indexes and chunks."""
    views = await catalog.look_everywhere(store)
    return [f"{view.prefix}/{name}" for view in views for name in view.sizes if keys.is_bulk(name)]


@pytest.mark.parametrize("why", ["the close is missing", "the catalog is damaged"])
async def test_collect_8_nothing_is_forgotten_without_its_close_in_the_catalog(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    await aborted(store, range(1, 2))
    monkeypatch.setattr(garbage, "ABORTED_KEPT", 0)
    if why == "the close is missing":
        monkeypatch.setattr(CatalogState, "_add", open_again(CatalogState._add))
    else:
        await store.put(batch_key(1), b"{}")
    await collection(store, Retention(), dry_run=False)
    assert "outcome" in await names(store, FIRST)


def open_again(add: Callable[[CatalogState, CatalogRecord], None]) -> Callable[[CatalogState, CatalogRecord], None]:
    """A state that misses all closes and removals, as that of a process that reads the catalog before they come."""

    def without(self: CatalogState, record: CatalogRecord) -> None:
        add(self, msgspec.structs.replace(record, kind="intent") if record.kind in ("close", "removed") else record)

    return without


async def test_a_start_lets_the_catalog_forget_what_was_removed_by_hand() -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    for entry in await store.list(FIRST):
        await store.delete(f"{FIRST}/{entry.name}")
    start = await starts.take(store, 1)
    await recover(store, start.start)
    known = CatalogLog(store)
    await known.refresh()
    assert [entry.tag for entry in known.state.entries.values()] == ["global_step2"]


# --- deletion -----------------------------------------------------------------------------------------------------


async def test_a_deleted_checkpoint_is_gone_and_the_others_load() -> None:
    store = MemoryStore()
    await saved(store, 1, 2, 3)
    await deletion(store, "global_step1", force=False, dry_run=False)
    assert await tags(store) == ["global_step3", "global_step2"]
    for step in (2, 3):
        await loads(store, step)
    with pytest.raises(NotFoundError, match="deleted"):
        await deletion(store, "global_step1", force=False, dry_run=False)


async def test_the_newest_is_deleted_only_by_force_and_latest_moves_back() -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    with pytest.raises(UsageError, match="what latest names"):
        await deletion(store, "global_step2", force=False, dry_run=False)
    report = await deletion(store, "global_step2", force=True, dry_run=False)
    assert report.latest_moved_to == "global_step1"
    assert await catalog.latest(store) == "global_step1"
    await deletion(store, "global_step1", force=True, dry_run=False)
    assert await catalog.latest(store) is None


async def test_latest_moves_off_a_deleted_checkpoint_although_another_attempt_of_its_tag_cannot_be_removed() -> None:
    store = Stubborn()
    await saved(store, 1)
    await aborted(store, range(2, 3))
    await saved(store, 2, k=1)
    await store.put(f"global_step2/00000001-0/{chunks_name(0, 0)}", b"put late")
    assert await catalog.latest(store) == "global_step2"
    store.stays = "global_step2/00000001-0"
    with pytest.raises(StoreError, match="Permission denied"):
        await deletion(store, "global_step2", force=True, dry_run=False)
    assert [c.tag for c in await catalog.checkpoints(store)] == ["global_step1"]
    assert await catalog.latest(store) == "global_step1"


async def test_no_older_attempt_of_a_deleted_tag_comes_back() -> None:
    store = MemoryStore()
    await saved(store, 1, tag="best")
    await saved(store, 2, tag="best", k=1)
    await saved(store, 3)
    await deletion(store, "best", force=False, dry_run=False)
    assert await tags(store) == ["global_step3"]


async def test_collecting_twice_removes_nothing_more() -> None:
    store = MemoryStore()
    await saved(store, 1, 2, 3)
    await collection(store, Retention(keep_last=1), dry_run=False)
    assert await collect(store, [view.facts for view in await catalog.scan(store)]) == []
