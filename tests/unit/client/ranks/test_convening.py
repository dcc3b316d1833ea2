"""Ranks that meet before there is a start, here threads with one store between them. Invariants: CONVENE-1 to CONVENE-3."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore

from checkpointd.config import Ranks
from checkpointd.errors import DeadlineError
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.ranks.convening import Assembly, convene

WORLD = 3
LONG_S, SHORT_S = 60.0, 0.3


class Job:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.store = HashStore()
        self._pool = pool
        self.assemblies = [self._assembly(rank) for rank in range(WORLD)]

    def _assembly(self, rank: int) -> Assembly:
        def board(ranks: Ranks, nonce: str) -> StoreBoard:
            return StoreBoard(PrefixStore(nonce, self.store), ranks)

        return Assembly(Ranks(rank=rank, world_size=WORLD), lambda: self.store, board)

    def come(self, rank: int, said: str = "", timeout_s: float = LONG_S) -> Future[Any]:
        return self._pool.submit(self.assemblies[rank].meet, said or f"{rank} is here", "saving", timeout_s)

    def all_meet(self) -> None:
        found = [self.come(rank) for rank in range(WORLD)]
        expected = {rank: f"{rank} is here" for rank in range(WORLD)}
        assert [one.result(60) for one in found] == [expected] * WORLD


@pytest.fixture
def job() -> Iterator[Job]:
    with ThreadPoolExecutor(WORLD) as pool:
        yield Job(pool)


def test_all_hear_what_each_said(job: Job) -> None:
    for _ in range(3):
        job.all_meet()


@pytest.mark.parametrize("met_before", [False, True])
@pytest.mark.parametrize("alone", [0, 1])
def test_who_calls_alone_is_told_who_is_missing_and_since_when(job: Job, alone: int, met_before: bool) -> None:
    if met_before:
        job.all_meet()
    error = job.come(alone, timeout_s=SHORT_S).exception(60)
    assert isinstance(error, DeadlineError)
    assert set(error.ranks) <= {rank for rank in range(WORLD) if rank != alone}
    assert error.ranks
    assert f"within {SHORT_S:g} s" in str(error)
    job.all_meet()
    job.all_meet()


def test_those_who_wait_together_for_one_are_all_told_of_it(job: Job) -> None:
    for _ in range(2):
        for one in [job.come(rank, timeout_s=SHORT_S) for rank in range(WORLD - 1)]:
            assert isinstance(one.exception(60), DeadlineError)
        job.all_meet()


def test_a_rank_that_begins_again_alone_finds_the_others_at_their_next_failure(job: Job) -> None:
    """As where a rank gave up just when the others had agreed on a board: it has none, and they have one."""
    job.all_meet()
    job.assemblies[2]._meetings = None
    waiting = [job.come(rank, timeout_s=SHORT_S) for rank in range(WORLD)]
    assert all(isinstance(one.exception(60), DeadlineError) for one in waiting)
    job.all_meet()


def test_one_process_meets_itself() -> None:
    for number in range(3):
        assert convene(str(number), "saving", SHORT_S) == {0: str(number)}
