"""PERSIST-6 of pipeline/write/persist.py and ATTEMPT-5 of pipeline/attempt.py: several writers persist one snapshot."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig, LoadConfig
from checkpointd.errors import StagingError, StoreError, UsageError
from checkpointd.layout.keys import TAKEOVERS_MAX, AttemptId, chunks_name, index_name
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.persist import persist
from checkpointd.pipeline.write.rates import Rates
from checkpointd.pipeline.write.vote import is_own, vote_no
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.builders import Save, load_arrays, phases, plan_save, rank_arrays

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"
NO = ErrorReport(code="StagingError", message="torn", phase="staging")


def takeover_of(save: Save, rank: int, takeover: int) -> AttemptInfo:
    return replace(save.info(rank), takeover=takeover, may_be_taken_over=True)


def job_of(save: Save, info: AttemptInfo) -> PersistJob:
    return PersistJob(
        store=save.store,
        info=info,
        shard=save.shard_of(info.rank),
        config=save.persist,
        rates=Rates(),
        progress=ShardProgress(),
        stopped=lambda: False,
    )


class Hand:
    """One writer's attempt; its snapshot is whole when `staged` is set."""

    def __init__(self, save: Save, rank: int, takeover: int, *, error: Exception | None = None) -> None:
        commit = CommitConfig(timeout_s=save.timeout_s, poll_min_s=0.001, poll_max_s=0.01)
        self._state = WriterState(store=save.store, persist=save.persist, commit=commit)
        deadline = asyncio.get_running_loop().time() + save.timeout_s
        self.staged = asyncio.Event()
        self.seen: list[Phase] = []
        self.freed = 0
        self.info = takeover_of(save, rank, takeover)
        self.attempt = Attempt(self._state, self.info, deadline=deadline, on_phase=self.seen.append, on_free=self._free)
        self._save, self._error = save, error

    def _free(self) -> None:
        self.freed += 1

    async def run(self) -> Attempt:
        await self.attempt.run(self._snapshot())
        await self._state.tidier.rest()
        return self.attempt

    async def _snapshot(self) -> Shard:
        await self.staged.wait()
        if self._error is not None:
            raise self._error
        return self._save.shard_of(self.info.rank)


async def names(store: Store) -> list[str]:
    return [entry.name for entry in await store.list(PREFIX)]


async def check_whole(save: Save) -> None:
    """The checkpoint is there, and whole."""
    checkpoint = await root_view.find(save.store, save.tag)
    assert (await verify(save.store, checkpoint, LoadConfig())).whole
    for rank in range(save.world_size):
        expected = {fqn: array.tobytes() for fqn, array in rank_arrays(rank).items()}
        assert await load_arrays(save.store, save.tag, rank) == expected


# --- the vote ----------------------------------------------------------------------------------------------------------


async def test_persist_6_the_hand_that_loses_the_race_takes_the_standing_vote_and_drops_its_own_objects() -> None:
    store = MemoryStore()
    save = await plan_save(store)
    first = await persist(job_of(save, takeover_of(save, 1, 3)))
    second = await persist(job_of(save, takeover_of(save, 1, 0)))
    assert first == second
    assert is_own(takeover_of(save, 1, 3), second)
    assert not is_own(takeover_of(save, 1, 0), second)
    assert await names(store) == sorted([chunks_name(1, 0, 3), index_name(1, 3), "00001.vote"])


async def test_persist_6_a_later_hand_that_finds_a_vote_writes_nothing() -> None:
    store = MemoryStore()
    save = await plan_save(store)
    await persist(job_of(save, takeover_of(save, 1, 0)))
    before = await names(store)
    job = job_of(save, takeover_of(save, 1, 1))
    assert not is_own(job.info, await persist(job))
    assert (await names(store), job.progress.raw_done) == (before, 0)


@pytest.mark.parametrize("change", [{"step": 7}, {"n": 7}])
@pytest.mark.parametrize("takeover", [0, 1])
async def test_persist_6_the_vote_of_another_save_is_another_process_and_an_error(
    change: dict[str, int], takeover: int
) -> None:
    save = await plan_save(MemoryStore())
    await persist(job_of(save, replace(takeover_of(save, 1, 2), **change)))  # type: ignore[arg-type]  # the fields named above
    with pytest.raises(StoreError, match="another process writes the same attempt"):
        await persist(job_of(save, takeover_of(save, 1, takeover)))


async def test_persist_6_without_hands_a_vote_that_is_there_is_an_error_as_it_was() -> None:
    save = await plan_save(MemoryStore())
    await persist(job_of(save, takeover_of(save, 1, 1)))
    with pytest.raises(StoreError, match="another process writes the same attempt"):
        await persist(job_of(save, save.info(1)))


@pytest.mark.parametrize("takeover", [0, 1])
async def test_persist_6_another_hands_no_is_this_ranks_failure_with_its_error(takeover: int) -> None:
    save = await plan_save(MemoryStore())
    assert await vote_no(save.store, takeover_of(save, 1, 2), NO)
    with pytest.raises(StagingError, match="another writer of rank 1 failed while staging: torn"):
        await persist(job_of(save, takeover_of(save, 1, takeover)))


def test_a_hand_that_has_no_names_is_refused() -> None:
    for takeover in (-1, TAKEOVERS_MAX):
        with pytest.raises(UsageError, match=f"takeover {takeover} cannot be"):
            AttemptInfo(tag=TAG, attempt=AttemptId(1, 0), rank=0, world_size=1, step=0, n=0, takeover=takeover)


async def _committed_by_others(save: Save, late: Hand) -> asyncio.Future[Attempt]:
    """`late`, whose snapshot is still being taken, runs while the first writers of both ranks commit."""
    others = [Hand(save, 0, 0), Hand(save, 1, 0)]
    running = asyncio.ensure_future(late.run())
    for takeover in others:
        takeover.staged.set()
    await asyncio.gather(*(takeover.run() for takeover in others))
    while late.attempt.phase is not Phase.COMMITTED:
        await asyncio.sleep(0)
    return running


@pytest.mark.parametrize("rank", [0, 1])
async def test_attempt_5_a_commit_seen_while_the_snapshot_is_still_taken_ends_as_committed(rank: int) -> None:
    save = await plan_save(MemoryStore())
    late = Hand(save, rank, 1)
    running = await _committed_by_others(save, late)
    assert late.seen == [Phase.PREPARED, Phase.COMMITTED]
    late.staged.set()
    assert (await running).error is None
    assert late.freed == 1
    await check_whole(save)


async def test_attempt_5_a_failure_after_another_hands_yes_waits_for_the_outcome_and_commits() -> None:
    save = await plan_save(MemoryStore())
    await save.announce()
    await persist(job_of(save, takeover_of(save, 1, 0)))
    failing, coordinator = Hand(save, 1, 1, error=StagingError("torn")), Hand(save, 0, 0)
    failing.staged.set()
    running = asyncio.ensure_future(failing.run())
    while Phase.PREPARED not in failing.seen:
        await asyncio.sleep(0)
    coordinator.staged.set()
    assert (await coordinator.run()).phase is Phase.COMMITTED
    assert (await running).phase is Phase.COMMITTED
    assert failing.seen == [Phase.FAILING, Phase.PREPARED, Phase.COMMITTED]
    await check_whole(save)


# --- the attempt -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [StagingError("torn"), None])
async def test_attempt_5_another_hands_no_fails_this_one_with_its_error(error: Exception | None) -> None:
    save = await plan_save(MemoryStore())
    await save.announce()
    await vote_no(save.store, takeover_of(save, 1, 0), NO)
    takeovers = [Hand(save, 0, 0), Hand(save, 1, 1, error=error)]
    for takeover in takeovers:
        takeover.staged.set()
    attempts = await asyncio.gather(*(takeover.run() for takeover in takeovers))
    assert phases(list(attempts)) in ([Phase.ABORTED, Phase.FAILED], [Phase.ABORTED, Phase.ABORTED])
    assert all(isinstance(attempt.error, StagingError) and "torn" in str(attempt.error) for attempt in attempts)
    assert [name for name in await names(save.store) if name.endswith((".chunks", ".index"))] == []


async def test_attempt_5_a_hand_that_was_asleep_wakes_after_the_abort_and_drops_its_own_objects_alone() -> None:
    store = MemoryStore()
    save = await plan_save(store)
    await save.announce()
    await vote_no(store, takeover_of(save, 0, 0), NO)
    coordinator = Hand(save, 0, 1)
    coordinator.staged.set()
    await coordinator.run()
    await store.put(f"{PREFIX}/{chunks_name(1, 0, 0)}", b"of the writer that sleeps")
    await store.put(f"{PREFIX}/{chunks_name(1, 0, 1)}", b"of another one")
    sleeper = Hand(save, 1, 0)
    sleeper.staged.set()
    assert (await sleeper.run()).phase in (Phase.ABORTED, Phase.FAILED)
    assert chunks_name(1, 0, 1) in await names(store)
    assert chunks_name(1, 0, 0) not in await names(store)
