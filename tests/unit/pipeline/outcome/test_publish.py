"""LOG-9 of pipeline/outcome/publish.py: one decision whoever appends it, commits only of whole attempts, plans that fit
together.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from checkpointd.commit.decide import Decision
from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig
from checkpointd.errors import FencedError, StoreError
from checkpointd.layout import keys
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import encode_index
from checkpointd.layout.keys import AttemptId, object_key
from checkpointd.layout.manifest import Vote
from checkpointd.pipeline.announcement import Announcement
from checkpointd.pipeline.outcome.outlived import anyhow
from checkpointd.pipeline.outcome.publish import Ballot, PlanCheck, append, draft_of, missing_ranks
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.indexes import index_named_by
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
from tests.builders import begin_start, leave_in_doubt, phases, plan_save, save_checkpoint

TAG, ATTEMPT = "global_step1", AttemptId(1, 0)
PREFIX = f"{TAG}/{ATTEMPT}"


async def voted(store: MemoryStore, *, world_size: int = 2) -> Ballot:
    """The ballot of an attempt for which every rank voted yes."""
    await leave_in_doubt(store, world_size=world_size, voting=tuple(range(world_size)))
    ballot = Ballot(store, TAG, ATTEMPT)
    await ballot.gather(await store.list(PREFIX))
    return ballot


async def put_plan(store: MemoryStore, ballot: Ballot, rank: int, **changes: object) -> None:
    """Give `rank` a plan that differs from its own in `changes` of its first tensor."""
    vote = ballot.votes[rank]
    assert vote is not None
    assert vote.index is not None
    index = await index_named_by(store, PREFIX, vote)
    tensors = (msgspec.structs.replace(index.tensors[0], **changes), *index.tensors[1:])
    ref, data = encode_index(msgspec.structs.replace(index, tensors=tensors), vote.index.name)
    await store.put(_key_of(ballot, rank), data)
    ballot.votes[rank] = msgspec.structs.replace(vote, index=ref)


def _key_of(ballot: Ballot, rank: int) -> str:
    vote = ballot.votes[rank]
    assert vote is not None
    assert vote.index is not None
    return object_key(PREFIX, vote.index.name)


async def drop_indexes(store: MemoryStore, ballot: Ballot) -> None:
    for rank in ballot.votes:
        await store.delete(_key_of(ballot, rank))


def words(decision: Decision | None) -> str:
    assert decision is not None
    assert decision.error is not None
    return decision.error.message


# --- the outcome -------------------------------------------------------------------------------------------------------


async def test_log_9_a_commit_whose_ballot_cannot_be_put_is_not_appended() -> None:
    class Refusing(MemoryStore):
        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            if "/ballot-" in key:
                raise StoreError("not now")
            return await super().put_if_absent(key, data, durable=durable)

    store = Refusing()
    ballot = await voted(store)
    draft = draft_of((await plan_save(store)).info(0), Decision(), ballot, decided_by=0)
    with pytest.raises(StoreError, match="not now"):
        await append(RootLog.of(store), draft)
    assert (await root_view.state_of(store)).attempts[PREFIX].status == "undecided"


async def test_log_7_a_newer_start_fences_a_save_that_was_not_announced() -> None:
    store = MemoryStore()
    old = await begin_start(store)
    await begin_start(store)
    with pytest.raises(FencedError, match=r"taken over memory://memory: start 2, by .* This job is start 1,"):
        await starts.check_fence(store, old)
    attempts = await save_checkpoint(store, start=old)
    assert phases(attempts) == [Phase.FAILED] * 2
    for attempt in attempts:
        assert isinstance(attempt.error, FencedError)
        for words in ("its further saves fail, too", "give each its own root", "open_checkpoint()"):
            assert words in str(attempt.error)
    assert await store.list(PREFIX) == []


async def test_attempt_6_a_log_that_cannot_be_read_for_a_moment_stops_no_save_that_nobody_fenced() -> None:
    class Refusing(MemoryStore):
        refusals = 0

        async def list(self, prefix: str) -> list[Entry]:
            if prefix == "log" and self.refusals:
                self.refusals -= 1
                raise StoreError("not now")
            return await super().list(prefix)

    store = Refusing()
    save = await plan_save(store)
    store.refusals = 1
    assert phases(await save.run_all()) == [Phase.COMMITTED] * 2
    assert store.refusals == 0
    later = Announcement(replace(save.info(0), attempt=AttemptId(1, 1), n=2), RootLog.of(store), CommitConfig(), anyhow)
    store.refusals = 2
    await later.awaited(asyncio.get_running_loop().time() + 60)
    assert (store.refusals, later.seen is not None) == (0, True)


# --- votes -------------------------------------------------------------------------------------------------------------


async def test_a_vote_is_read_once_and_one_that_cannot_be_read_stands_as_invalid() -> None:
    store = MemoryStore()
    await leave_in_doubt(store)
    await store.put(f"{PREFIX}/00001.vote", b"scribble")
    ballot = Ballot(store, TAG, ATTEMPT)
    entries = await store.list(PREFIX)
    await ballot.gather(entries)
    assert ballot.votes[1] is None
    assert isinstance(ballot.votes[0], Vote)
    assert words(ballot.decide(2)) == "the vote of rank 1 cannot be read"
    await store.delete(f"{PREFIX}/00000.vote")
    await ballot.gather(entries)
    assert isinstance(ballot.votes[0], Vote)


async def test_a_look_lists_only_the_groups_of_ranks_that_miss_votes_and_reads_each_vote_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "RANKS_PER_GROUP", 2)
    store, calls = MemoryStore(), list[str]()
    save = await leave_in_doubt(store, voting=(0, 1, 2, 4, 5), world_size=6)
    whole_list, get = store.list, store.get

    async def listed(prefix: str) -> list[Entry]:
        calls.append(prefix)
        return await whole_list(prefix)

    async def read(key: str, **options: int) -> bytes:
        calls.append(key)
        return await get(key, **options)

    monkeypatch.setattr(store, "list", listed)
    monkeypatch.setattr(store, "get", read)
    ballot = Ballot(store, TAG, ATTEMPT)
    await ballot.look(6)
    assert sorted(ballot.votes) == [0, 1, 2, 4, 5]
    calls.clear()
    await ballot.look(6)
    assert calls == [f"{PREFIX}/1"]
    await save.vote(3)
    calls.clear()
    await ballot.look(6)
    assert calls == [f"{PREFIX}/1", f"{PREFIX}/1/00003.vote"]
    calls.clear()
    await ballot.look(6)
    assert (calls, ballot.decide(6)) == ([], Decision())


def test_missing_ranks_say_how_far_they_came_and_other_names_say_nothing() -> None:
    names = ["00000.vote", "00001-0.chunks", "00002.index", "000003.vote", "\u00b2\u00b2\u00b2\u00b2\u00b2.chunks", "x.index"]
    found = missing_ranks([Entry(name, 1, is_prefix=False) for name in names], 4)
    assert found == {1: "had begun to write", 2: "had begun to write", 3: "had written nothing"}


# --- plans -------------------------------------------------------------------------------------------------------------


async def test_commit_2_plans_that_are_whole_together_have_no_fault_and_are_read_once() -> None:
    store = MemoryStore()
    ballot = await voted(store, world_size=3)
    check = PlanCheck(store)
    assert await check.fault(ballot.votes) is None
    await drop_indexes(store, ballot)
    assert await check.fault(ballot.votes) is None


async def test_commit_2_where_one_rank_changed_its_plan_that_one_alone_is_read_and_all_are_compared() -> None:
    store = MemoryStore()
    ballot = await voted(store, world_size=3)
    check = PlanCheck(store)
    assert await check.fault(ballot.votes) is None
    for rank in (0, 2):
        await store.delete(_key_of(ballot, rank))
    await put_plan(store, ballot, 1, fqn="model.other")
    assert await check.fault(ballot.votes) is None
    await put_plan(store, ballot, 1, scope="global", box=Box((0, 0), (32, 48)))
    fault = words(await check.fault(ballot.votes))
    assert "(ranks [1]): 1536 of 3072 elements are written by no rank: pass the same objects to save() on every rank" in fault


async def test_commit_2_a_plan_that_is_not_there_aborts() -> None:
    store = MemoryStore()
    ballot = await voted(store)
    await drop_indexes(store, ballot)
    assert f"there is no object '{PREFIX}/" in words(await PlanCheck(store).fault(ballot.votes))


async def test_commit_2_a_plan_whose_bytes_changed_aborts() -> None:
    store = MemoryStore()
    ballot = await voted(store)
    key = _key_of(ballot, 1)
    data = bytearray(await store.get(key))
    data[20] ^= 1
    await store.put(key, bytes(data))
    fault = words(await PlanCheck(store).fault(ballot.votes))
    assert f"{key} is damaged: the bytes of its plan are not those that its vote names" in fault
