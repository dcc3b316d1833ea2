"""Waits that say what is missing, by a clock that the test sets."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig
from checkpointd.errors import StoreError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import AnnounceRecord
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from checkpointd.waits import Waiting, is_done
from tests.builders import begin_start, make_shard, rank_arrays


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "still waiting" in record.getMessage()]


def test_a_word_comes_after_10_seconds_and_whenever_the_wait_has_doubled(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    waiting = Waiting(lambda: f"rank 3, at {clock.now:g}", clock=clock)
    heard = []
    for second in range(200):
        clock.now = float(second)
        waiting.look()
        heard += [(second, said(caplog)[-1])] if len(said(caplog)) > len(heard) else []
    assert heard == [(s, f"still waiting after {s} s: rank 3, at {s}") for s in (10, 20, 40, 80, 160)]


def test_a_wait_in_slices_is_as_long_as_it_was_to_be(caplog: pytest.LogCaptureFixture) -> None:
    clock, slices = Clock(), []

    def wait(seconds: float) -> bool:
        slices.append(seconds)
        clock.now += seconds
        return clock.now >= 100.0

    assert not Waiting(lambda: "rank 1", clock=clock).until(wait, 50.0)
    assert (slices, clock.now, len(said(caplog))) == ([10.0, 10.0, 20.0, 10.0], 50.0, 3)
    assert Waiting(lambda: "rank 1", clock=clock).until(wait)
    assert not Waiting(lambda: "rank 1", clock=clock).until(lambda _: False, 0.0)


def test_a_wait_ends_whatever_is_rounded() -> None:
    """A clock that stands still while nothing is waited for, as that of a simulation, must not be waited for in vain."""
    for start in range(1000):
        clock, slices = Clock(), 0

        def wait(seconds: float, clock: Clock = clock) -> bool:
            nonlocal slices
            slices += 1
            clock.now += seconds
            return slices > 5

        clock.now = 20.0 + start / 7
        assert not Waiting(lambda: "rank 1", clock=clock).until(wait, start / 999)


def test_a_word_that_cannot_be_had_does_not_end_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> str:
        raise StoreError("the ranks cannot be asked")

    clock = Clock()
    waiting = Waiting(missing, clock=clock)
    clock.now = 11.0
    waiting.look()
    assert said(caplog) == ["still waiting after 11 s: the ranks cannot be asked"]


def test_a_future_is_waited_for_no_longer_than_it_takes() -> None:
    future: Future[int] = Future()
    threading.Timer(0.01, future.set_result, (7,)).start()
    assert Waiting(lambda: "it").until(lambda seconds: is_done(future, seconds))
    assert future.result() == 7


def simulated_attempt(rank: int, deadline_s: float, *, announced: bool = False) -> Attempt:
    """One rank of two, in virtual time; the other never saves. `announced`: by the other one."""
    store = MemoryStore()
    info = AttemptInfo(tag="global_step1", attempt=AttemptId(1, 0), rank=rank, world_size=2, step=1, n=0)

    async def main() -> Attempt:
        await begin_start(store)
        await asyncio.sleep(1.0)
        if announced:
            assert await RootLog.of(store).add(AnnounceRecord(attempt=info.prefix, n=info.n, step=info.step)) == ""
        attempt = Attempt(WriterState(store=store, commit=CommitConfig(timeout_s=deadline_s)), info, deadline=deadline_s)

        async def staged() -> Shard:
            return make_shard(rank_arrays(rank))

        await attempt.run(staged())
        return attempt

    return simloop.run(1, main())


def test_a_coordinator_that_waits_for_votes_names_the_ranks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "checkpointd")
    assert simulated_attempt(0, 100.0).phase is Phase.ABORTED
    words = [r for r in caplog.records if "still waiting" in r.getMessage()]
    assert [round(float(r.getMessage().split()[3])) for r in words] == [10, 20, 40, 80]
    assert {r.levelno for r in words} == {logging.WARNING}
    assert all("global_step1/00000001-0: no vote from rank 1:" in r.getMessage() for r in words)
    assert all(r.getMessage().endswith("Call save() on every rank, not on one rank alone") for r in words)


@pytest.mark.parametrize("has_begun", [True, False])
def test_another_rank_warns_only_if_rank_0_has_not_begun_the_save(caplog: pytest.LogCaptureFixture, has_begun: bool) -> None:
    caplog.set_level(logging.INFO, "checkpointd")
    assert simulated_attempt(1, 30.0, announced=has_begun).phase is Phase.ABORTED
    words = [r for r in caplog.records if "still waiting" in r.getMessage()]
    assert {r.levelno for r in words} == {logging.INFO if has_begun else logging.WARNING}
    assert len(words) == 2
    assert all("rank 0 has not put the outcome: save() was not called there" in r.getMessage() for r in words)


def test_a_store_that_is_silent_is_named_while_it_is_waited_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = MemoryStore.list

    async def silent(store: MemoryStore, prefix: str) -> list[Entry]:
        if asyncio.get_running_loop().time() >= 1.0:  # the start has begun
            await asyncio.Event().wait()
        return await listing(store, prefix)

    monkeypatch.setattr(MemoryStore, "list", silent)
    assert simulated_attempt(0, 50.0).phase is Phase.FAILED
    assert "still waiting after 10 s: the storage has not answered" in said(caplog)
