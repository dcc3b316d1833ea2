"""RECOVER-1 and RECOVER-2 of recover.py: what is in doubt is decided by what is there, and `latest` is set right."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from checkpointd.commit import garbage
from checkpointd.config import LoadConfig
from checkpointd.errors import StoreError
from checkpointd.layout.catalog_records import CATALOG, CatalogEntry, decode_batch
from checkpointd.layout.keys import DELETED, AttemptId, attempt_lease_key, shown_key
from checkpointd.layout.manifest import BesideFile, Deleted, Shown, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.outcome import recover as recovering
from checkpointd.pipeline.outcome.recover import Recovery, judge, recover
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import catalog, starts
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.marks import condemn
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, ObjectWriter
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from tests.builders import begin_start, leave_in_doubt, load_arrays, save_checkpoint

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"


async def restart(store: MemoryStore) -> Recovery:
    """What the next start of the job does."""
    return await recover(store, await begin_start(store))


async def damaged(store: MemoryStore, key: str, fault: str) -> None:
    data = await store.get(key)
    await store.delete(key)
    if fault == "flip":
        await store.put(key, bytes([*data[:-2], data[-2] ^ 1, data[-1]]))
    elif fault == "truncate":
        await store.put(key, data[:-1])


# --- RECOVER-1: decided by what is there --------------------------------------------------------------------------------------


async def test_recover_1_votes_of_all_ranks_are_rolled_forward_to_a_whole_checkpoint() -> None:
    store = MemoryStore()
    await leave_in_doubt(store, world_size=3, voting=(2, 0, 1))
    done = await restart(store)
    assert [(o.tag, o.outcome, o.decided_by) for o in done.decided] == [(TAG, "commit", -1)]
    checkpoint = await catalog.find(store, TAG)
    assert (checkpoint.outcome.step, checkpoint.outcome.order, checkpoint.outcome.world_size) == (1, (1, 1), 3)
    assert (await verify(store, checkpoint, LoadConfig())).whole


async def test_recover_2_a_start_that_was_overtaken_moves_latest_to_no_commit_that_a_power_cut_may_take() -> None:
    """The newer start's writer died between the link of its outcome and the sync (found by simulation, seed 501452)."""
    store, done = MemoryStore(), list[str]()
    late = await begin_start(store)
    await save_checkpoint(store, tag=TAG, start=await begin_start(store), world_size=1)
    await store.delete("latest")
    settle, put = store.settle, store.put_if_match

    async def settled(key: str) -> None:
        done.append(key)
        await settle(key)

    async def moved(key: str, expected: bytes | None, data: bytes) -> bool:
        if key == "latest":
            done.append(key)
        return await put(key, expected, data)

    store.settle, store.put_if_match = settled, moved  # type: ignore[method-assign]
    await recover(store, late)
    assert done[:2] == [f"{TAG}/00000002-0/outcome", "latest"]


async def test_recover_2_nothing_rests_on_an_outcome_that_cannot_be_made_durable(caplog: pytest.LogCaptureFixture) -> None:
    """Its writer died before its sync, and now the disk fails: neither `latest` nor the catalog may name it (found by
    simulation, seed 708907).
    """
    store, outcome = MemoryStore(), f"{PREFIX}/outcome"
    await save_checkpoint(store, tag=TAG, world_size=1)
    await store.delete("latest")
    newest = max(entry.name for entry in await store.list(CATALOG))
    assert decode_batch(await store.get(f"{CATALOG}/{newest}"), int(newest.partition(".")[0])).records[-1].kind == "close"
    await store.delete(f"{CATALOG}/{newest}")
    settle, fails = store.settle, True

    async def settled(key: str) -> None:
        if fails and key == outcome:
            raise StoreError("I/O error")
        await settle(key)

    store.settle = settled  # type: ignore[method-assign]
    done = await restart(store)
    assert (done.latest_moved_to, await catalog.latest(store)) == (None, None)
    assert not (await known(store))[PREFIX].is_decided
    assert "I/O error; the next start tries again" in caplog.text
    assert "the catalog goes without what is new" in caplog.text
    fails = False
    done = await restart(store)
    assert (done.latest_moved_to, await catalog.latest(store)) == (TAG, TAG)
    assert (await known(store))[PREFIX].is_decided


async def test_recover_2_where_latest_cannot_move_the_mark_of_what_it_names_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next start would take a checkpoint that was removed on purpose for a lost one."""
    monkeypatch.setattr(garbage, "ROOT_RECORDS_KEPT", 0)
    store = MemoryStore()
    await save_checkpoint(store, tag="removed", step=1)
    await condemn(store, "removed/00000001-0", "the test", ())
    await save_checkpoint(store, tag=TAG, step=2)
    await store.put("latest", b"removed\n")
    settle, fails = store.settle, True

    async def settled(key: str) -> None:
        if fails and key == f"{PREFIX}/outcome":
            raise StoreError("I/O error")
        await settle(key)

    store.settle = settled  # type: ignore[method-assign]
    done = await restart(store)
    assert (done.latest_moved_to, await catalog.latest(store)) == (None, "removed")
    assert await store.stat("removed/00000001-0/deleted") is not None
    fails = False
    done = await restart(store)
    assert (done.latest_moved_to, await catalog.latest(store)) == (TAG, TAG)


async def known(store: MemoryStore) -> dict[str, CatalogEntry]:
    log = CatalogLog(store)
    await log.refresh()
    return log.state.entries


async def test_an_attempt_that_the_catalog_does_not_name_is_announced_before_it_is_decided() -> None:
    """CATALOG-1. Its lease may come before its announcement, and both show it to a start."""
    put: list[str] = []

    class Watched(MemoryStore):
        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            if key.endswith(".records"):
                put.extend(f"{record.kind} {record.tag}" for record in decode_batch(data, int(key[-20:-8])).records)
            elif key.endswith("/outcome"):
                put.append(key)
            return await super().put_if_absent(key, data, durable=durable)

    store = Watched()
    start = await begin_start(store)
    await store.put(attempt_lease_key(f"{TAG}/{AttemptId(start, 0)}"), b"")
    put.clear()
    done = await restart(store)
    assert [(o.tag, o.outcome) for o in done.decided] == [(TAG, "abort")]
    assert put[:3] == [f"intent {TAG}", f"{TAG}/{AttemptId(start, 0)}/outcome", f"close {TAG}"]


@pytest.mark.parametrize("voting", [(), (0,), (1,), (0, 2), (1, 2)])
async def test_recover_1_a_missing_vote_aborts_and_the_bulk_goes_while_the_votes_stay(voting: tuple[int, ...]) -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, world_size=3, voting=voting)
    if not voting:
        await store.put(save.info(0).key("00000-0.chunks"), b"begun")
    done = await restart(store)
    [outcome] = done.decided
    assert outcome.outcome == "abort"
    assert outcome.ranks == (tuple(sorted({0, 1, 2} - {*voting})) if voting else ())
    [view] = await catalog.attempts_of(store, TAG)
    assert sorted(view.sizes) == [*(f"{rank:05d}.vote" for rank in sorted(voting)), "outcome"]
    assert await catalog.latest(store) is None


@pytest.mark.parametrize("name", ["00001.index", "00001-0.chunks", "00001.vote"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
async def test_recover_1_a_yes_whose_word_does_not_hold_aborts(name: str, fault: str) -> None:
    store = MemoryStore()
    await leave_in_doubt(store)
    key = f"{PREFIX}/{name}"
    await damaged(store, key, fault)
    [outcome] = (await restart(store)).decided
    if name.endswith(".chunks") and fault == "flip":
        # Recovery looks at sizes, not at every byte: loading finds this, and falls back.
        assert outcome.outcome == "commit"
        return
    assert outcome.outcome == "abort"
    assert outcome.error is not None
    if fault != "remove" or name != "00001.vote":
        assert "rank 1" in outcome.error.message


async def test_recover_1_a_no_aborts() -> None:
    store = MemoryStore()
    await leave_in_doubt(store, failing={1: RuntimeError("out of luck")})
    [outcome] = (await restart(store)).decided
    assert outcome.outcome == "abort"
    assert outcome.error is not None
    assert "out of luck" in outcome.error.message


async def test_recover_1_a_vote_too_large_to_be_read_aborts_instead_of_stopping_every_start() -> None:
    class Store(MemoryStore):
        async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
            return await super().get(key, size_max=min(size_max, 1 << 16))

    store = Store()
    await leave_in_doubt(store)
    await store.put(f"{PREFIX}/00001.vote", bytes(1 << 17))
    [outcome] = (await restart(store)).decided
    assert outcome.outcome == "abort"
    assert outcome.ranks == (1,)


async def test_recover_1_attempts_of_this_start_and_later_are_left_alone() -> None:
    store = MemoryStore()
    await leave_in_doubt(store, start=2)
    done = await recover(store, 2)
    assert done.decided == []
    assert (await catalog.attempts_of(store, TAG))[0].state == "in-doubt"


async def test_judging_says_what_would_be_and_writes_nothing() -> None:
    store = MemoryStore()
    await leave_in_doubt(store)
    [view] = await catalog.attempts_of(store, TAG)
    assert (await judge(store, view)).outcome.outcome == "commit"
    assert (await catalog.attempts_of(store, TAG))[0] == view


# --- RECOVER-2: afterwards ----------------------------------------------------------------------------------------------------


async def test_recover_2_several_attempts_of_several_starts_are_all_decided() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag="global_step1")
    await leave_in_doubt(store, tag="global_step2", voting=(0,))
    await leave_in_doubt(store, tag="global_step3", start=2)
    await leave_in_doubt(store, tag="global_step4", start=2, voting=(1,))
    done = await restart(store)
    assert {o.tag: o.outcome for o in done.decided} == {
        "global_step2": "abort",
        "global_step3": "commit",
        "global_step4": "abort",
    }
    assert "in-doubt" not in {view.state for view in await catalog.scan(store)}
    assert await catalog.latest(store) == "global_step3"


async def test_recover_2_recovering_again_finds_nothing_to_do() -> None:
    store = MemoryStore()
    await leave_in_doubt(store)
    await restart(store)
    again = await restart(store)
    assert (again.decided, again.latest_moved_to, again.swept) == ([], None, 0)


async def test_recover_2_two_starts_that_race_come_to_one_end() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag="global_step1")
    await leave_in_doubt(store, tag="global_step2")
    await leave_in_doubt(store, tag="global_step3", voting=(0,))
    first, second = await begin_start(store), await begin_start(store)
    await asyncio.gather(recover(store, first), recover(store, second))
    assert {view.tag: view.state for view in await catalog.scan(store)} == {
        "global_step1": "committed",
        "global_step2": "committed",
        "global_step3": "aborted",
    }
    assert await catalog.latest(store) == "global_step2"
    assert (await verify(store, await catalog.find(store, "global_step2"), LoadConfig())).whole


async def test_recover_2_a_coordinator_that_is_late_meets_the_outcome_of_recovery() -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=(1,))
    await restart(store)
    attempt = await save.run(0)
    assert attempt.outcome is not None
    assert (attempt.outcome.outcome, attempt.outcome.decided_by) == ("abort", -1)


class Died(Exception):
    """No error of the storage: nothing may catch it, as nothing catches the end of a machine."""


class Dying(MemoryStore):
    """Dies before its `left`-th change, and is whole again when it is told so."""

    left: int | None = None

    def _live(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise Died
            self.left -= 1

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._live()
        return await super().put_if_match(key, expected, data)

    async def delete(self, key: str, *, durable: bool = True) -> None:
        self._live()
        await super().delete(key, durable=durable)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self._live()
        return await super().open_writer(key, size_hint=size_hint, size_max=size_max)


async def history(store: MemoryStore) -> None:
    """A commit, a tag saved twice whose first attempt was not yet removed, an abort in doubt, and a commit in doubt."""
    await save_checkpoint(store, tag="global_step1")
    assert (await read_back(store, await catalog.find(store, "global_step1"))).whole  # so that others may go
    await leave_in_doubt(store, tag="best", n=5)
    await leave_in_doubt(store, tag="best", k=1, n=6, start=1)
    await leave_in_doubt(store, tag="global_step2", voting=(1,))
    await leave_in_doubt(store, tag="global_step3", n=7)


async def seen(store: MemoryStore) -> tuple[dict[str, list[str]], str | None, list[Entry]]:
    views = await catalog.scan(store)
    states = {view.prefix: sorted([view.state, *view.sizes]) for view in views}
    return states, await catalog.latest(store), await store.list(".checkpointd/plans")


async def test_recover_2_a_recovery_that_dies_anywhere_is_finished_by_the_next() -> None:
    whole = MemoryStore()
    await history(whole)
    await recover(whole, 2)
    expected = await seen(whole)
    steps, died = 0, True
    while died:
        store = Dying()
        await history(store)
        store.left, died = steps, False
        try:
            await recover(store, 2)
        except Died:
            died = True
        store.left = None
        assert (await catalog.latest(store)) in {"global_step1", "global_step3"}
        await recover(store, 3)
        assert await seen(store) == expected
        assert (await verify(store, await catalog.find(store, "global_step3"), LoadConfig())).whole
        steps += 1
    assert steps > 5


# --- latest ------------------------------------------------------------------------------------------------------------

POINTERS = {
    "absent": None,
    "behind": b"global_step1\n",
    "empty": b"",
    "not text": b"\xff\xfe\x00",
    "no tag": b"../../etc/passwd\n",
    "longer than any tag": b"x" * (catalog.LATEST_BYTES_MAX + 1),
    "without its newline": b"global_step1",
}
LOST = {"a tag that is gone": b"global_step99\n", "a tag whose commit is gone": b"global_step3\n"}


async def _pointing_at(content: bytes | None) -> MemoryStore:
    """Two commits and an abort, and that pointer."""
    store = MemoryStore()
    for tag in ("global_step1", "global_step2"):
        await save_checkpoint(store, tag=tag)
    await save_checkpoint(store, tag="global_step3", failing={0: RuntimeError("no")})
    await store.delete("latest")
    if content is not None:
        await store.put("latest", content)
    return store


@pytest.mark.parametrize("pointer", LOST)
async def test_recover_2_a_pointer_to_what_is_gone_stays_until_the_loss_is_accepted(
    pointer: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovering, "ABSENCE_S", 0.01)
    store = await _pointing_at(LOST[pointer])
    assert (await restart(store)).latest_moved_to is None
    assert await store.get("latest") == LOST[pointer]
    assert "which cannot be loaded" in caplog.text
    done = await recover(store, await begin_start(store), accepts_loss=True)
    assert done.latest_moved_to == "global_step2"


@pytest.mark.parametrize("pointer", POINTERS)
async def test_recover_2_latest_names_the_newest_commit_whatever_it_was(pointer: str) -> None:
    store = await _pointing_at(POINTERS[pointer])
    done = await restart(store)
    assert done.latest_moved_to == "global_step2"
    assert await store.get("latest") == b"global_step2\n"


async def test_recover_2_latest_that_is_right_is_not_touched() -> None:
    store = MemoryStore()
    await save_checkpoint(store)
    assert (await restart(store)).latest_moved_to is None
    assert await catalog.latest(store) == TAG


async def test_recover_2_latest_never_names_what_did_not_ask_for_it() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag="global_step1")
    await leave_in_doubt(store, tag="global_step2", save_latest=False)
    done = await restart(store)
    assert [o.outcome for o in done.decided] == ["commit"]
    assert await catalog.latest(store) == "global_step1"


async def test_latest_never_goes_back_however_moves_race() -> None:
    store = MemoryStore()
    tags = [f"global_step{n}" for n in range(1, 7)]
    for tag in tags:
        await save_checkpoint(store, tag=tag, save_latest=False)
    found = [await catalog.find(store, tag) for tag in tags]
    await asyncio.gather(*(move_latest(store, c.tag, c.outcome.order) for c in found[::2] + found[1::2]))
    assert await catalog.latest(store) == "global_step6"
    assert not await move_latest(store, found[0].tag, found[0].outcome.order)
    assert not await move_latest(store, found[5].tag, found[5].outcome.order)


async def test_a_name_that_only_looks_like_an_attempt_is_no_second_one() -> None:
    store = MemoryStore()
    await save_checkpoint(store)
    for name in ("000000001-0", "00000001-00", "\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661-0", "00000001-0.bak"):
        await store.put(f"{TAG}/{name}/outcome", await store.get(f"{PREFIX}/outcome"))
    [view] = await catalog.attempts_of(store, TAG)
    assert view.attempt == AttemptId(1, 0)
    assert (await restart(store)).decided == []
    assert await load_arrays(store, TAG, 0)


async def test_a_record_that_leads_out_of_its_directory_keeps_no_job_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = PosixStore(tmp_path / ".checkpointd")
    for tag in ("step1", "step2"):
        await save_checkpoint(store, tag=tag, world_size=1)
    await store.put(f"step1/00000001-0/{DELETED}", encode(Deleted(reason="a test", writer=writer())))
    forged = Shown(
        tag="step1", attempt="00000001-0", order=(1, 0), save_latest=True, files=(), beside=(BesideFile("../x", 1, 1),)
    )
    await store.put(shown_key("shown/step1"), encode(forged))
    (tmp_path / "shown" / "step1").mkdir(parents=True)
    done = await recover(store, (await starts.take(store, 1)).start)
    assert done.checkpoints == 1
    assert "'../x' cannot be a file in the directory above a checkpoint's files" in caplog.text


# --- what a start takes -------------------------------------------------------------------------------------------------------


class Distant(MemoryStore):
    """A store that is far away: each call takes a second of the loop's time."""

    async def list(self, prefix: str) -> list[Entry]:
        await asyncio.sleep(1)
        return await super().list(prefix)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        await asyncio.sleep(1)
        return await super().get(key, size_max=size_max)

    async def stat(self, key: str) -> int | None:
        await asyncio.sleep(1)
        return await super().stat(key)

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        await asyncio.sleep(1)
        return await super().put_if_absent(key, data, durable=durable)

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await asyncio.sleep(1)
        await super().delete(key, durable=durable)


def recovery_s(in_doubt: int, **left: Any) -> float:
    """How long a start takes that finds so many attempts in doubt, in seconds of a virtual clock."""

    async def main() -> float:
        store = MemoryStore()
        for step in range(in_doubt):
            await leave_in_doubt(store, tag=f"global_step{step}", step=step, n=step, **left)
        start, clock, distant = await begin_start(store), asyncio.get_running_loop().time, Distant()
        distant.__dict__.update(store.__dict__)
        began = clock()
        done = await recover(distant, start)
        assert len(done.decided) == in_doubt
        assert [outcome.tag for outcome in done.decided] == sorted(outcome.tag for outcome in done.decided)
        return clock() - began

    return simloop.run(0, main())


@pytest.mark.parametrize("voting", [(0, 1), (0,)], ids=["rolled forward", "aborted"])
def test_a_start_settles_sixteen_attempts_in_little_more_time_than_one(voting: tuple[int, ...]) -> None:
    """A job that dies behind storage that loses replies leaves hundreds; one after the other, they took minutes."""
    assert recovery_s(16, voting=voting) < 3 * recovery_s(1, voting=voting)


def test_an_attempt_of_many_ranks_is_judged_in_little_more_time_than_one_of_few() -> None:
    few, many = (recovery_s(1, world_size=ranks, voting=tuple(range(ranks))) for ranks in (2, 16))
    assert many < 2 * few


def test_an_attempt_that_lost_the_shards_of_many_ranks_is_aborted_as_soon_as_one_that_lost_one() -> None:
    """A missing object is looked for again for seconds, and one is enough for the abort."""

    async def aborted_s(lost: int) -> float:
        store, clock = MemoryStore(), asyncio.get_running_loop().time
        await leave_in_doubt(store, world_size=64, voting=tuple(range(64)))
        for rank in range(lost):
            await store.delete(f"{PREFIX}/{rank:05d}.index")
        [view] = await catalog.attempts_of(store, TAG)
        began = clock()
        decided = (await judge(store, view)).outcome
        assert decided.error is not None
        assert "rank 0 voted yes, but" in decided.error.message
        return clock() - began

    assert 0 < simloop.run(0, aborted_s(64)) < 2 * simloop.run(0, aborted_s(1))
