"""COLLECT-1 to COLLECT-3 of pipeline/gc/collect.py: what goes with removed checkpoints, and what others refer to."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, LoadConfig
from checkpointd.errors import RootGoneError, StoreError, StoreFullError, UnreadableError
from checkpointd.layout.keys import file_name
from checkpointd.layout.log_records import entry_key
from checkpointd.pipeline.gc.collect import Kept, Removal, references, remove, survey, sweep
from checkpointd.pipeline.gc.retire import retire
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import CheckpointVerdict, Damage, record_verdict, verify
from checkpointd.pipeline.root import reserve, root_view, starts
from checkpointd.pipeline.root.ballots import ballot_key
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.builders import Arrays, attempts_at, leave_in_doubt, load_arrays, phases, plan_save, restart, save_checkpoint

FIRST = "global_step1/00000001-0"


def state(step: int, frozen: int = 0) -> Arrays:
    """A frozen tensor, encoded apart from the one that moves: it lies in an object of its own only where codecs differ."""
    return {"frozen": np.arange(frozen, frozen + 3000, dtype=np.int32), "moving": np.full(2000, step, dtype=np.float32)}


async def saved(store: Store, *steps: int, frozen: int = 0, world_size: int = 1, **options: object) -> None:
    for step in steps:
        arrays = state(step, frozen)
        given = {"tag": f"global_step{step}", "step": step, "n": step, "world_size": world_size, "dedup": True}
        attempts = await save_checkpoint(store, tensors=lambda _, arrays=arrays: arrays, **(given | options))
        assert phases(attempts) == [Phase.COMMITTED] * world_size


async def collected(store: Store, keep_last: int = 1) -> Sequence[Removal]:
    return await retire(store, await attempts_at(store), Retention(keep_last))


async def delete(store: Store, *tags: str) -> Sequence[Removal]:
    """What a person's deletion does."""
    assert await remove(store, {"the test": [(await root_view.find(store, tag)).prefix for tag in tags]}) == ""
    return await sweep(store)


async def needed_of(store: Store, *holders: str, without: Sequence[str] = ()) -> object:
    return (await references(store, await root_view.state_of(store), holders, without))[0]


async def names(store: Store, prefix: str) -> list[str]:
    return [entry.name for entry in await store.list(prefix)]


async def loads(store: Store, step: int, frozen: int = 0) -> None:
    expected: Mapping[str, bytes] = {fqn: array.tobytes() for fqn, array in state(step, frozen).items()}
    assert await load_arrays(store, f"global_step{step}", 0) == expected
    assert (await verify(store, await root_view.find(store, f"global_step{step}"), LoadConfig())).whole


def listed(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


async def tags(store: Store) -> list[str]:
    return [c.tag for c in await root_view.checkpoints(store)]


async def test_what_a_newer_checkpoint_refers_to_stays_and_goes_with_it() -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    [removal] = await collected(store)
    assert (removal.tag, removal.kept) == ("global_step1", ("00000-0.chunks",))
    assert await tags(store) == ["global_step2"]
    assert await names(store, FIRST) == ["00000-0.chunks"]
    assert not (await root_view.state_of(store)).attempts[FIRST].swept
    await loads(store, 2)
    await saved(store, 3, frozen=9)  # which refers to nothing
    await read_back(store, await root_view.find(store, "global_step3"))
    assert {removal.tag for removal in await collected(store)} == {"global_step1", "global_step2"}
    assert (await names(store, FIRST), await names(store, "global_step2/00000001-0")) == ([], [])
    assert (await root_view.state_of(store)).attempts[FIRST].swept
    await loads(store, 3, frozen=9)


@pytest.mark.parametrize("removed", [1, 2])
async def test_collect_2_what_an_undecided_attempt_may_refer_to_stays(removed: int) -> None:
    """It refers to what its base refers to, or to its base itself."""
    store = MemoryStore()
    await saved(store, *range(1, removed + 1))
    await leave_in_doubt(store, voting=(0,), tag="global_step5", n=5, world_size=1, dedup=True, tensors=lambda _: state(5))
    await saved(store, 6, frozen=9)
    await delete(store, *(f"global_step{step}" for step in range(1, removed + 1)))
    assert "00000-0.chunks" in await names(store, FIRST)
    done = await restart(store, world_size=1)
    assert [record.attempt for record in done.decided] == ["global_step5/00000001-0"]
    await loads(store, 5)


async def test_collect_2_what_cannot_be_told_removes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    await saved(store, 1, 2)
    await store.put(ballot_key((await root_view.find(store, "global_step2")).commit), b"scribble")
    before = await names(store, FIRST)
    assert await delete(store, "global_step1") == []
    assert "cannot be read, so all of it stays" in caplog.text
    assert await names(store, FIRST) == before


@pytest.mark.parametrize("damage", ["an entry is cut", "an entry is missing"])
async def test_a_damaged_log_removes_nothing(damage: str) -> None:
    store = MemoryStore()
    await saved(store, 1, 2, dedup=False)
    assert await remove(store, {"the test": [FIRST]}) == ""
    before, number = await names(store, FIRST), RootLog.of(store).state.number
    await store.put(entry_key(number + 2), b"")
    if damage == "an entry is cut":
        await store.put(entry_key(number + 1), b"{")
    other = MemoryStore()
    other.__dict__.update({name: value for name, value in store.__dict__.items() if name != "_root_log"})
    assert await sweep(other) == []
    assert await names(other, FIRST) == before


async def test_collect_3_a_directory_that_a_person_has_brought_there_stays() -> None:
    store = MemoryStore()
    await saved(store, 1, 2, dedup=False)
    for key in ("global_step1/00000001-7/00000-0.chunks", "other/00000001-0/00000.index", f"{FIRST}-old/00000.index"):
        await store.put(key, b"a person's")
    await delete(store, "global_step1")
    assert await names(store, FIRST) == []
    assert await names(store, "global_step1") == ["00000001-0-old", "00000001-7"]
    assert await names(store, "other/00000001-0") == ["00000.index"]


async def test_a_survey_says_what_would_go_and_writes_nothing(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    await saved(store, 1, 2, 3)
    before = listed(tmp_path)
    would = await survey(store, RootLog.of(store).state, {"the test": [FIRST, "global_step2/00000001-0"]})
    assert listed(tmp_path) == before
    assert list(await delete(store, "global_step1", "global_step2")) == would
    assert would[0].kept_bytes > 0


async def test_what_stays_for_others_is_looked_at_again_only_once_one_of_them_goes() -> None:
    """Each look costs a listing, and the ballots of all who refer to it."""
    store, looks = MemoryStore(), list[str]()
    await saved(store, 1, 2, 3, 4)
    kept: Kept = {}
    assert await remove(store, {"the test": [FIRST]}) == ""
    await sweep(store, kept=kept)
    listed, get = store.list, store.get

    async def noted(prefix: str) -> list[object]:
        looks.append(prefix)
        return await listed(prefix)  # type: ignore[return-value]

    async def read(key: str, **options: int) -> bytes:
        looks.append(key)
        return await get(key, **options)

    store.list, store.get = noted, read  # type: ignore[method-assign, assignment]

    def of_others(step: int) -> Iterator[str]:
        return (look for look in looks if look.startswith(FIRST) or ("/ballot-" in look and f"step{step}/" not in look))

    await sweep(store, kept=kept)
    assert [look for look in looks if look.startswith("global_step")] == []
    assert await remove(store, {"the test": ["global_step2/00000001-0"]}) == ""
    await sweep(store, kept=kept)  # step 4 needs all that stayed, so the one that went changes nothing
    assert list(of_others(2)) == []
    looks.clear()
    assert await remove(store, {"the test": ["global_step4/00000001-0"]}) == ""
    await sweep(store, kept=kept)
    assert FIRST in looks
    assert await remove(store, {"the test": ["global_step3/00000001-0"]}) == ""
    await sweep(store, kept=kept)
    assert (await listed(FIRST), kept) == ([], {})


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
    assert await needed_of(store, FIRST) == {FIRST: {f"{FIRST}/00000-0.chunks"}}
    assert sorted(key.partition("/")[0] for key in read if "/ballot-" in key) == ["global_step2", "global_step3"]
    assert await needed_of(store, FIRST, without=[f"global_step{n}/00000001-0" for n in (2, 3)]) == {}
    read.clear()
    assert await needed_of(store, "global_step4/00000001-0") == {}
    assert not [key for key in read if "/ballot-" in key]


# --- retention ----------------------------------------------------------------------------------------------------


async def test_what_cannot_be_read_just_now_says_nothing_of_a_verified_one() -> None:
    store = MemoryStore()
    await saved(store, 1)
    found = await root_view.find(store, "global_step1")
    await record_verdict(store, found, await verify(store, found, LoadConfig()))
    away = Damage.of(UnreadableError("I/O error"), 0)
    await record_verdict(store, found, CheckpointVerdict(found.tag, str(found.id), unreadable=[away]))
    assert (await root_view.state_of(store)).attempts[FIRST].verified


async def test_tidy_5_nothing_is_removed_from_a_copy_in_the_roots_place(tmp_path: Path) -> None:
    root, away = tmp_path / "root", tmp_path / "away"
    root.mkdir()
    async with PosixStore(root) as store:
        await saved(store, 1, 2)
        save, own = await plan_save(store, tag="global_step2"), OwnRoot(store)
        await own.begun(1, (await starts.read(store, 1)).nonce)
        RootLog.of(store).belongs_to(own.is_begun)
        tidier = Tidier(store, CommitConfig(retention=Retention(keep_last=1)), own.check)
        root.rename(away)
        shutil.copytree(away, root)
        await tidier.tidy(save.info(0))
        with pytest.raises(RootGoneError):
            await tags(store)
        async with PosixStore(root) as copy:
            assert await tags(copy) == ["global_step2", "global_step1"]
        shutil.rmtree(root)
        away.rename(root)
        await tidier.tidy(save.info(0))
        assert await tags(store) == ["global_step2"]


async def test_a_full_disk_removes_in_place_of_the_ballast() -> None:
    """There is room for one small object, once the ballast is gone."""

    class Full(MemoryStore):
        is_full = False

        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            if self.is_full and key.startswith("log/") and await self.stat(reserve.KEY) is not None:
                raise StoreFullError("No space left on device")
            return await super().put_if_absent(key, data, durable=durable)

    store = Full()
    await saved(store, 1, 2, dedup=False)
    await read_back(store, await root_view.find(store, "global_step2"))
    await store.put(reserve.KEY, b"ballast")
    store.is_full = True
    save = await plan_save(store, tag="global_step3")
    await Tidier(store, CommitConfig(retention=Retention(keep_last=1))).tidy(save.info(0))
    assert await tags(store) == ["global_step2"]
    assert await names(store, FIRST) == []


async def test_a_removal_that_is_cancelled_begins_nothing_more() -> None:
    """Who closes a Checkpointer waits for it."""

    class Slow(MemoryStore):
        begun = 0

        async def delete(self, key: str, *, durable: bool = True) -> None:
            self.begun += 1
            await asyncio.sleep(0)
            await super().delete(key, durable=durable)

    store = Slow()
    for step in (1, 2):
        await leave_in_doubt(store, tag=f"global_step{step}", world_size=1, voting=())
    await starts.take(store, 1)
    for step, n in itertools.product((1, 2), range(100)):
        await store.put(f"global_step{step}/00000001-0/{file_name(0, n)}", b"put")
    before = store.begun
    removal = asyncio.create_task(sweep(store))
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


@pytest.mark.parametrize("stays", ["an aborted attempt", "a removed checkpoint"])
async def test_an_attempt_that_cannot_be_removed_keeps_no_other_from_it(stays: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Stubborn()
    await saved(store, 1)
    save = await leave_in_doubt(store, voting=(0,), tag="global_step2", n=2)
    store.stays = FIRST if stays == "a removed checkpoint" else save.info(0).prefix
    await starts.take(store, 1)
    for step in (3, 4, 5):
        await saved(store, step, frozen=step)
    await collected(store)
    assert await tags(store) == ["global_step5"]
    assert "could not be removed: deleting" in caplog.text
    assert await store.list(store.stays)
    assert not (await root_view.state_of(store)).attempts[store.stays].swept
    left, store.stays = store.stays, None
    await sweep(store)
    assert not await store.list(left)
