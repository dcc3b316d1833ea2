"""ATTEMPT-4 of pipeline/attempt.py: a rank that has failed does not wait for a coordinator that says nothing.

Nor for a store that can take no word of the save before somebody acts.
"""

from __future__ import annotations

import asyncio
from typing import NoReturn

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig
from checkpointd.errors import LinkError, StagingError, StoreFullError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline import attempt
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import make_shard, rank_arrays

DEADLINE_S = 120.0


def holds(data: bytes, *kinds: str) -> bool:
    """Whether `data` is an entry of the log with a record of one of these kinds."""
    return any(f'"kind": "{kind}"'.encode() in data for kind in kinds)


def saved_by(
    ranks: dict[int, Exception | None], world_size: int, kind: type[MemoryStore] = MemoryStore
) -> tuple[list[Attempt], float]:
    """One attempt of `ranks`, each of which fails where it has an error, in virtual time: how they end, and after how long."""

    async def main() -> tuple[list[Attempt], float]:
        store = kind()
        await starts.take(store, world_size)
        attempts = [
            Attempt(
                WriterState(store=store, commit=CommitConfig(timeout_s=DEADLINE_S)),
                AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=rank, world_size=world_size, step=1, n=0),
                deadline=DEADLINE_S,
            )
            for rank in ranks
        ]

        async def staged(rank: int, error: Exception | None) -> Shard:
            if error is not None:
                raise error
            return make_shard(rank_arrays(rank))

        await asyncio.gather(*(a.run(staged(*of)) for a, of in zip(attempts, ranks.items(), strict=True)))
        return attempts, asyncio.get_running_loop().time()

    return simloop.run(1, main())


def test_a_rank_that_failed_ends_the_attempt_where_the_coordinator_is_silent() -> None:
    (failed, other), seconds = saved_by({1: StagingError("the copy was torn"), 2: None}, world_size=3)
    assert seconds < attempt.NO_S + 2.0
    assert (failed.phase, other.phase) == (Phase.FAILED, Phase.ABORTED)
    assert isinstance(other.error, StagingError)
    assert other.error.ranks == (1,)
    assert "rank 1 failed while staging: the copy was torn" in str(other.error)


class HasNoRoom(MemoryStore):
    """Has room for a vote, and none for a decision, until `until`, in seconds."""

    until = DEADLINE_S * 2

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if holds(data, "commit", "abort") and asyncio.get_running_loop().time() < self.until:
            raise StoreFullError("No space left on device")
        return await super().put_if_absent(key, data, durable=durable)


def test_the_only_rank_does_not_wait_for_room_for_its_abort() -> None:
    (failed,), seconds = saved_by({0: StagingError("the copy was torn")}, 1, HasNoRoom)
    assert (failed.phase, seconds < attempt.NO_S + 2.0) == (Phase.FAILED, True)
    assert "failed: the copy was torn; the failure could not be stored (No space left on device)" in str(failed.error)
    assert seconds < 1.0


def test_where_other_ranks_wait_for_it_there_may_be_room_before_the_deadline() -> None:
    ended, seconds = saved_by({0: StagingError("the copy was torn"), 1: None}, 2, HasNoRoom)
    assert ([a.phase for a in ended], seconds >= DEADLINE_S) == ([Phase.FAILED] * 2, True)
    assert "could not be stored for the other ranks" in str(ended[0].error)


def test_a_coordinator_whose_vote_is_the_last_decides_at_once_however_rarely_it_looks() -> None:
    async def main() -> None:
        info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=0, world_size=1, step=1, n=0)
        commit = CommitConfig(timeout_s=DEADLINE_S, poll_max_s=30.0)
        store = MemoryStore()
        await starts.take(store, 1)
        coordinator = Attempt(WriterState(store=store, commit=commit), info, deadline=DEADLINE_S)

        async def staged() -> Shard:
            await asyncio.sleep(100.0)
            return make_shard(rank_arrays(0))

        await coordinator.run(staged())
        assert coordinator.phase is Phase.COMMITTED
        assert asyncio.get_running_loop().time() < 101.0

    simloop.run(1, main())


class LinkedStore(MemoryStore):
    """One in which a symbolic link stands at the tag."""

    async def list(self, prefix: str) -> NoReturn:
        raise LinkError("global_step1 is a symbolic link")

    async def get(self, key: str, *, size_max: int | None = None) -> NoReturn:
        raise LinkError("global_step1 is a symbolic link")

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> NoReturn:
        raise LinkError("global_step1 is a symbolic link")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_in_the_way_ends_a_save(rank: int, caplog: pytest.LogCaptureFixture) -> None:
    info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=rank, world_size=2, step=1, n=0)

    async def staged() -> Shard:
        await asyncio.sleep(DEADLINE_S / 10)  # while this rank looks in vain
        return make_shard(rank_arrays(rank))

    async def main() -> tuple[Attempt, float]:
        saved = Attempt(WriterState(store=LinkedStore(), commit=CommitConfig(timeout_s=DEADLINE_S)), info, deadline=DEADLINE_S)
        await saved.run(staged())
        return saved, asyncio.get_running_loop().time()

    saved, seconds = simloop.run(1, main())
    assert seconds < DEADLINE_S / 2
    assert (saved.phase, type(saved.error)) == (Phase.FAILED, LinkError)
    assert "global_step1 is a symbolic link" in str(saved.error)
    said = [record.getMessage() for record in caplog.records]
    assert sum("cannot look for the outcome" in line for line in said) == 1
    assert any(
        f"rank {rank} cannot store its no: global_step1 is" in line and "tries to store the abort" in line for line in said
    )
    assert all("the other ranks" not in line for line in said)


def test_a_rank_that_fails_before_anybody_has_announced_the_attempt_aborts_it() -> None:
    """The coordinator has died: nobody else says a word."""
    (failed,), seconds = saved_by({2: StagingError("the copy was torn")}, world_size=3)
    assert (failed.phase, seconds < attempt.NO_S + 2.0) == (Phase.FAILED, True)
    assert failed.outcome is not None
    assert failed.outcome.abort is not None
    assert failed.outcome.abort.decided_by == 2
