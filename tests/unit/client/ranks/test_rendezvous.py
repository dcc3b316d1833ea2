"""Meetings of ranks, here threads with one store between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from checkpointd.config import Ranks
from checkpointd.errors import DeadlineError
from checkpointd_client.ranks.board import SoloBoard, StoreBoard
from checkpointd_client.ranks.rendezvous import Meetings
from tests.faults.jobs import wait_until

WORLD = 4
LONG_S, SHORT_S = 60.0, 0.3


class Job:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.store = HashStore()
        ranks = [Ranks(rank=rank, world_size=WORLD) for rank in range(WORLD)]
        self.meetings = [Meetings(StoreBoard(PrefixStore("job", self.store), r), r, LONG_S) for r in ranks]
        self._pool = pool

    def all(self, says: Callable[[int], str], ranks: range = range(WORLD)) -> list[Any]:
        """What each of `ranks` heard, or the error that it got."""
        found = [self._pool.submit(self.meetings[rank].meet, says(rank), "saving") for rank in ranks]
        return [one.exception(60) or one.result() for one in found]

    def patience(self, *seconds: float) -> None:
        for meeting, one in zip(self.meetings, seconds, strict=True):
            meeting.timeout_s = one


@pytest.fixture
def job() -> Iterator[Job]:
    with ThreadPoolExecutor(WORLD) as pool:
        yield Job(pool)


def test_all_hear_what_each_said(job: Job) -> None:
    for number in range(3):
        expected = {rank: f"{number} of {rank % 2}" for rank in range(WORLD)}
        assert job.all(lambda rank, number=number: f"{number} of {rank % 2}") == [expected] * WORLD


def test_nothing_is_left_but_the_last_meeting(job: Job) -> None:
    for _ in range(20):
        job.all(lambda _: "the same")
    assert job.store.num_keys() == WORLD + 1


@pytest.mark.parametrize("absent", [0, 2])
def test_those_who_do_not_come_are_named_and_the_next_meeting_is_as_ever(job: Job, absent: int) -> None:
    job.patience(*[SHORT_S] * WORLD)
    came = [rank for rank in range(WORLD) if rank != absent]
    for rank in came:
        errors = [one for one in job.all(lambda _: "without one", range(rank, rank + 1)) if one]
        assert isinstance(errors[0], DeadlineError)
        assert absent in errors[0].ranks or came[0] != rank
    job.patience(*[LONG_S] * WORLD)
    for number in range(3):
        assert job.all(lambda rank, number=number: f"{rank}: {number}") == [{r: f"{r}: {number}" for r in range(WORLD)}] * WORLD


def test_ranks_that_wait_together_for_one_are_all_told_of_it(job: Job) -> None:
    job.patience(*[SHORT_S] * WORLD)
    for error in job.all(lambda _: "without the last", range(WORLD - 1)):
        assert isinstance(error, DeadlineError)
    job.patience(*[LONG_S] * WORLD)
    assert job.all(lambda _: "all") == [dict.fromkeys(range(WORLD), "all")] * WORLD


def test_who_gives_up_early_may_come_back_to_those_who_wait(job: Job) -> None:
    """Rank 1 has less patience than the others, and calls again."""
    job.patience(LONG_S, SHORT_S, LONG_S, LONG_S)

    def again(rank: int) -> dict[int, str]:
        if rank == 3:
            wait_until(lambda: job.meetings[1]._old, "rank 1 has given up")
        if rank == 1:
            wait_until(lambda: job.meetings[1].board.absent("meeting/1", [0, 2]) == [], "ranks 0 and 2 have come")
            with pytest.raises(DeadlineError, match="rank 3"):
                job.meetings[1].meet("first", "saving")
            job.meetings[1].timeout_s = LONG_S
        return job.meetings[rank].meet("at last", "saving")

    with ThreadPoolExecutor(WORLD) as pool:
        assert list(pool.map(again, range(WORLD))) == [dict.fromkeys(range(WORLD), "at last")] * WORLD


def test_one_process_meets_itself() -> None:
    board = SoloBoard()
    meetings = Meetings(board, Ranks(), LONG_S)
    for number in range(5):
        assert meetings.meet(str(number), "saving") == {0: str(number)}
    assert len(board._notes) == 2


@pytest.mark.parametrize("alone", [0, 1])
def test_who_is_alone_is_told_how_long_it_waited(job: Job, alone: int) -> None:
    job.patience(*[SHORT_S] * WORLD)
    [error] = job.all(lambda _: "alone", range(alone, alone + 1))
    assert f"within {SHORT_S:g} s" in str(error)
