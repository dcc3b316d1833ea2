"""RECOVER-1 of recover.py: what is in doubt is decided by what is there, and `latest` is set right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from checkpointd.config import LoadConfig
from checkpointd.errors import StoreError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import AbortRecord, CommitRecord
from checkpointd.pipeline.outcome.recover import judge
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import SMALL_BYTES_MAX, Entry
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import leave_in_doubt, restart, save_checkpoint

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"


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
    assert [(type(o), o.tag, o.decided_by) for o in done.decided] == [(CommitRecord, TAG, -1)]
    checkpoint = await root_view.find(store, TAG)
    assert (checkpoint.commit.step, checkpoint.commit.order, checkpoint.commit.world_size) == (1, (1, 1), 3)
    assert (await verify(store, checkpoint, LoadConfig())).whole


class WithoutBallots(MemoryStore):
    """Ballots cannot be read."""

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        if "/ballot-" in key:
            raise StoreError(f"reading {key} failed: Input/output error")
        return await super().get(key, size_max=size_max)


async def test_recover_1_a_ballot_that_cannot_be_read_aborts_nothing_if_all_votes_are_there() -> None:
    store = WithoutBallots()
    await leave_in_doubt(store)
    await store.put(f"{PREFIX}/ballot-{'0' * 32}", b"of a coordinator that died")
    done = await restart(store)
    assert [type(o) for o in done.decided] == [CommitRecord]


@pytest.mark.usefixtures("short_looks")
@pytest.mark.parametrize("name", ["00001.index", "00001-0.chunks", "00001.vote"])
@pytest.mark.parametrize("fault", ["flip", "truncate", "remove"])
async def test_recover_1_a_yes_whose_word_does_not_hold_aborts(name: str, fault: str) -> None:
    store = MemoryStore()
    await leave_in_doubt(store)
    key = f"{PREFIX}/{name}"
    await damaged(store, key, fault)
    [decided] = (await restart(store)).decided
    if name.endswith(".chunks") and fault == "flip":
        # Recovery looks at sizes, not at every byte: loading finds this, and falls back.
        assert isinstance(decided, CommitRecord)
        return
    assert isinstance(decided, AbortRecord)


async def test_recover_1_a_vote_too_large_to_be_read_aborts_instead_of_stopping_every_start() -> None:
    class Store(MemoryStore):
        async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
            return await super().get(key, size_max=min(size_max, 1 << 16))

    store = Store()
    await leave_in_doubt(store)
    await store.put(f"{PREFIX}/00001.vote", bytes(1 << 17))
    [decided] = (await restart(store)).decided
    assert isinstance(decided, AbortRecord)


# --- afterwards -------------------------------------------------------------------------------------------------------


async def test_what_a_rank_that_died_has_put_after_the_sweep_of_an_aborted_attempt_goes_with_the_next_start() -> None:
    store = MemoryStore()
    await save_checkpoint(store, failing={1: RuntimeError("no")})
    assert RootLog.of(store).state.attempts[PREFIX].swept
    await store.put(f"{PREFIX}/00001-0.chunks", b"put late")
    await restart(store)
    assert await root_view.objects_of(store, PREFIX) == []


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
        clock, distant = asyncio.get_running_loop().time, Distant()
        distant.__dict__.update({name: value for name, value in store.__dict__.items() if name != "_root_log"})
        began = clock()
        done = await restart(distant)
        assert len(done.decided) == in_doubt
        assert {one.attempt.partition("/")[0] for one in done.decided} == {f"global_step{step}" for step in range(in_doubt)}
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
        began = clock()
        decided = (await judge(store, TAG, AttemptId(1, 0))).record
        assert isinstance(decided, AbortRecord)
        assert "rank 0 voted yes, but" in decided.error.message
        return clock() - began

    assert 0 < simloop.run(0, aborted_s(64)) < 2 * simloop.run(0, aborted_s(1))
