"""What a save took, told apart, in virtual time: in the status, in the vote, and in what is told of the vote later."""

from __future__ import annotations

import asyncio

import pytest

from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.daemon.jobs import SaveJob
from checkpointd.layout.keys import AttemptId, vote_name
from checkpointd.layout.manifest import Vote
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.meter import Meter
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.report.votes import rank_words
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import attempts_at, begin_start, make_shard, rank_arrays
from tests.unit.pipeline.test_attempt_progress import FSYNC_S, SlowStore

STAGING_S = (3.0, 10.0)


def saved_by_two(store: MemoryStore) -> list[PhaseSeconds]:
    """Rank 1 takes its snapshot 7 s later than rank 0; each of them waits for one fsync of its disk."""

    async def main() -> list[PhaseSeconds]:
        await begin_start(store)
        jobs = []
        for rank in range(2):
            state = WriterState(
                store=store,
                persist=PersistConfig(compression="none"),
                commit=CommitConfig(timeout_s=1000.0, read_back=False),
            )
            info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=rank, world_size=2, step=1, n=0)
            jobs.append(SaveJob("/root", "nonce", 0, state, info, left_s=1000.0, on_change=lambda _: None))
        loop = asyncio.get_running_loop()
        for rank, job in enumerate(jobs):
            assert job._staged is not None
            loop.call_later(STAGING_S[rank], job._staged.set_result, make_shard(rank_arrays(rank)))
        await asyncio.gather(*(job.task for job in jobs))
        return [job.status().seconds for job in jobs]

    return simloop.run(1, main())


def test_what_a_save_took_is_told_apart() -> None:
    first, last = saved_by_two(SlowStore())
    for seconds, staging in zip((first, last), STAGING_S, strict=True):
        assert seconds.staging == pytest.approx(staging, abs=0.1)
        assert seconds.disk == pytest.approx(FSYNC_S, abs=0.1)
        assert seconds.persisting == pytest.approx(FSYNC_S, abs=0.5)
    assert first.waiting == pytest.approx(STAGING_S[1] - STAGING_S[0], abs=1.0)
    assert last.waiting == pytest.approx(0.0, abs=1.0)


def test_the_vote_keeps_it_for_who_asks_later() -> None:
    store = SlowStore()
    told = saved_by_two(store)

    async def read() -> list[Vote]:
        return [await root_view.read_vote(store, f"global_step1/00000001-0/{vote_name(rank)}") for rank in range(2)]

    async def words() -> list[PhaseSeconds]:
        [attempt] = await attempts_at(store, "global_step1")
        return [word.seconds for word in (await rank_words(store, attempt, {})).ranks]

    for seconds, vote, word in zip(told, asyncio.run(read()), asyncio.run(words()), strict=True):
        assert (vote.seconds.staging, vote.seconds.disk) == (seconds.staging, seconds.disk)
        assert vote.seconds.waiting is None
        assert word.disk == seconds.disk
        assert word.waiting is not None


def test_what_overlaps_is_counted_once() -> None:
    async def main() -> Meter:
        meter = Meter()

        async def piece(after_s: float, lasts_s: float) -> None:
            await asyncio.sleep(after_s)
            with meter.busy(10):
                await asyncio.sleep(lasts_s)

        await asyncio.gather(piece(0, 2), piece(1, 2), piece(5, 1))
        return meter

    meter = simloop.run(1, main())
    assert meter.seconds == pytest.approx(4.0, abs=0.01)
    assert meter.nbytes == 30
