"""ATTEMPT-5 of pipeline/attempt.py, and PERSIST-6 of pipeline/write/vote.py: a trainer ends the attempt of a lost sidecar."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig, LoadConfig
from checkpointd.errors import CheckpointdError, StagingError
from checkpointd.layout.keys import vote_name
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.shard import Shard, ShardProgress
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.rates import Rates
from checkpointd.pipeline.write.vote import VoteUncertain, has_voted, put_yes, vote_no
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.builders import Save, load_arrays, plan_save, rank_arrays

PREFIX = "global_step1/00000001-0"
LOST = ErrorReport(code="SidecarError", message="the sidecar at /run/socket was lost", phase="persisting")


def job_of(save: Save, rank: int) -> PersistJob:
    return PersistJob(
        store=save.store,
        info=save.info(rank),
        shard=save.shard_of(rank),
        config=save.persist,
        rates=Rates(),
        progress=ShardProgress(),
        stopped=lambda: False,
    )


class Process:
    """A process with an attempt of one rank. Its snapshot is whole when `staged` is set. `lost`: it is the trainer of a sidecar
    that is lost.
    """

    def __init__(self, save: Save, rank: int, *, lost: ErrorReport | None = None) -> None:
        commit = CommitConfig(timeout_s=save.timeout_s, poll_min_s=0.001, poll_max_s=0.01)
        self._state = WriterState(store=save.store, persist=save.persist, commit=commit)
        deadline = asyncio.get_running_loop().time() + save.timeout_s
        self.staged = asyncio.Event()
        self.seen: list[Phase] = []
        self.attempt = Attempt(self._state, save.info(rank), deadline=deadline, on_phase=self.seen.append, lost=lost)
        self._save, self._rank, self._lost = save, rank, lost

    async def run(self) -> Attempt:
        await self.attempt.run(self._snapshot() if self._lost is None else None)
        await self._state.tidier.rest()
        return self.attempt

    async def _snapshot(self) -> Shard:
        await self.staged.wait()
        return self._save.shard_of(self._rank)


def trainer_of(save: Save, rank: int) -> Process:
    return Process(save, rank, lost=LOST)


async def names(store: Store) -> set[str]:
    return {entry.name for entry in await store.list(PREFIX)}


async def check_whole(save: Save) -> None:
    """The checkpoint is there, and whole."""
    checkpoint = await root_view.find(save.store, save.tag)
    assert (await verify(save.store, checkpoint, LoadConfig())).whole
    for rank in range(save.world_size):
        expected = {fqn: array.tobytes() for fqn, array in rank_arrays(rank).items()}
        assert await load_arrays(save.store, save.tag, rank) == expected


# --- the trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
async def test_attempt_5_a_yes_that_the_sidecar_has_put_counts_and_its_trainer_ends_the_attempt(lost: int) -> None:
    save = await plan_save(MemoryStore())
    await save.announce()
    await persist(job_of(save, lost))
    trainer, other = trainer_of(save, lost), Process(save, 1 - lost)
    other.staged.set()
    ended = await asyncio.gather(trainer.run(), other.run())
    assert [attempt.phase for attempt in ended] == [Phase.COMMITTED] * 2
    assert trainer.seen == [Phase.PREPARED, Phase.COMMITTED]
    await check_whole(save)


async def test_attempt_5_a_sidecar_that_wakes_up_after_the_no_of_its_trainer_ends_and_leaves_nothing() -> None:
    save = await plan_save(MemoryStore())
    sleeper, trainer, other = Process(save, 1), trainer_of(save, 1), Process(save, 0)
    other.staged.set()
    sleeping = asyncio.ensure_future(sleeper.run())
    await asyncio.gather(trainer.run(), other.run())
    sleeper.staged.set()
    woken = await sleeping
    assert woken.phase in (Phase.ABORTED, Phase.FAILED)
    assert "the sidecar at /run/socket was lost" in str(woken.error)
    assert not [name for name in await names(save.store) if name.endswith((".chunks", ".index"))]


# --- its vote ---------------------------------------------------------------------------------------------------------


async def test_persist_6_a_sidecar_that_finds_the_no_of_its_trainer_fails_with_its_reason() -> None:
    save = await plan_save(MemoryStore())
    torn = ErrorReport(code="StagingError", message="torn", phase="staging")
    assert await vote_no(save.store, save.info(1), torn, has_written=False)
    with pytest.raises(StagingError, match="rank 1 has voted no: torn"):
        await persist(job_of(save, 1))


class LosesReplies(MemoryStore):
    """The first yes of rank 1 is put, and its put fails."""

    is_lost = False

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        done = await super().put_if_absent(key, data, durable=durable)
        if key.endswith(vote_name(1)) and not self.is_lost:
            self.is_lost = True
            raise CheckpointdError("the reply was lost")
        return done


async def test_persist_6_the_same_yes_may_be_put_again() -> None:
    """After a lost reply, or by the daemon that goes on with a shard in the spool."""
    save = await plan_save(LosesReplies())
    with pytest.raises(VoteUncertain, match="the reply was lost"):
        await persist(job_of(save, 1))
    vote = await root_view.read_vote(save.store, save.info(1).key(vote_name(1)))
    assert await has_voted(save.store, save.info(1), vote)
    await put_yes(save.store, save.info(1), vote)
    assert not await has_voted(save.store, save.info(0), vote)


@pytest.mark.parametrize("change", ["step", "n", "index"])
async def test_persist_6_a_vote_of_another_process_that_runs_as_this_rank_is_an_error(change: str) -> None:
    save = await plan_save(MemoryStore())
    info = save.info(1)
    await persist(job_of(save, 1))
    vote = await root_view.read_vote(save.store, info.key(vote_name(1)))
    assert vote.index is not None
    if change == "index":
        vote = structs.replace(vote, index=structs.replace(vote.index, digest="0" * 32))
    else:
        info = replace(info, **{change: 7})  # type: ignore[arg-type]  # the fields named above
    with pytest.raises(VoteUncertain, match="another process writes the same attempt"):
        await put_yes(save.store, info, vote)
