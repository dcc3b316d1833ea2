"""What ranks say to each other before there is a start; here threads with one store between them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from checkpointd import waits
from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DeadlineError, StoreError
from checkpointd_client.ranks import board
from checkpointd_client.ranks.board import broadcast_from_coordinator
from tests.faults.jobs import wait_until

WORLD = 4
LONG_S, SHORT_S = 60.0, 0.3
DOING = "making its Checkpointer"


class Job:
    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.store = HashStore()
        self.made: list[str] = []
        self._pool = pool

    def rank(self, rank: int, *, text: str = "", come_s: float = LONG_S, make_s: float = LONG_S) -> Future[Any]:
        """Begin rank `rank`'s part."""

        def make() -> dict[str, object]:
            self.made.append(text)
            return {"text": text}

        return self._begin(rank, make, come_s, make_s)

    def _begin(self, rank: int, make: Callable[[], dict[str, object]], come_s: float, make_s: float) -> Future[Any]:
        ranks = Ranks(rank=rank, world_size=WORLD)
        call = partial(broadcast_from_coordinator, ranks, make, doing=DOING, come_s=come_s, make_s=make_s, store=self.store)
        return self._pool.submit(call)

    def failing(self, error: Exception) -> Future[Any]:
        """Begin rank 0's part, which fails."""

        def make() -> dict[str, object]:
            raise error

        return self._begin(0, make, LONG_S, LONG_S)


@pytest.fixture
def job() -> Iterator[Job]:
    with ThreadPoolExecutor(WORLD) as pool:
        yield Job(pool)


def missing_of(found: Future[Any]) -> tuple[int, ...]:
    error = found.exception(60)
    assert isinstance(error, DeadlineError)
    assert f"every rank must be {DOING}" in str(error)
    return error.ranks


def test_all_hear_what_rank_0_made_as_often_as_they_ask(job: Job) -> None:
    for text in ("one", "two", "x" * 100_000):
        assert [f.result(60) for f in [job.rank(r, text=text) for r in range(WORLD)]] == [{"text": text}] * WORLD
    assert len(job.made) == 3


def test_nothing_is_made_and_everybody_hears_who_is_missing(job: Job) -> None:
    """Rank 0 gives up first, and tells those who came: nobody waits for as long as it is patient itself."""
    came = [job.rank(1), job.rank(3)]
    wait_until(lambda: job.store.check([f"checkpointd/broadcast/here/{rank}" for rank in (1, 3)]), "both have come")
    came.append(job.rank(0, come_s=SHORT_S))
    assert [missing_of(found) for found in came] == [(2,)] * 3
    assert job.made == []


@pytest.mark.parametrize("alone", [0, 2])
def test_a_rank_that_comes_alone_names_all_others(job: Job, alone: int) -> None:
    assert missing_of(job.rank(alone, come_s=SHORT_S)) == tuple(rank for rank in range(WORLD) if rank != alone)


def test_who_gave_up_may_come_again_and_nobody_answers_what_it_asked_before(job: Job) -> None:
    for rank in (2, 0, 2, 1, 0):
        assert missing_of(job.rank(rank, come_s=SHORT_S))
    assert [f.result(60) for f in [job.rank(r, text="now") for r in range(WORLD)]] == [{"text": "now"}] * WORLD
    assert job.made == ["now"]


def test_a_rank_whose_host_died_in_the_middle_of_it_is_waited_for_anew(job: Job) -> None:
    """What a rank of an earlier incarnation shows, in a store that outlived it, answers nobody."""
    job.store.set("checkpointd/broadcast/here/1", "of the dead")
    job.store.set("checkpointd/broadcast/to/of the dead", "checkpointd/broadcast/said/of the dead")
    came = [job.rank(r, text="now", make_s=LONG_S) for r in range(WORLD)]
    assert [f.result(60) for f in came] == [{"text": "now"}] * WORLD


def test_an_error_on_rank_0_is_raised_everywhere(job: Job) -> None:
    came = [job.failing(StoreError("no space")), *(job.rank(r) for r in range(1, WORLD))]
    assert isinstance(came[0].exception(60), StoreError)
    for found in came[1:]:
        error = found.exception(60)
        assert isinstance(error, CheckpointdError)
        assert "rank 0 could not open the root: StoreError: no space" in str(error)


def test_who_is_missing_stands_in_the_log_meanwhile(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waits, "FIRST_REPORT_S", SHORT_S / 10)
    with caplog.at_level(logging.WARNING, "checkpointd"):
        came = [job.rank(1)]
        wait_until(lambda: len(caplog.records) > 1, "it is said, and said again")
        words = [record.getMessage() for record in caplog.records]
        came += [job.rank(rank) for rank in (0, 2, 3)]
        assert [found.result(60) for found in came] == [{"text": ""}] * WORLD
    assert all(f"ranks 0, 2-3 have not come yet: every rank must be {DOING}" in word for word in words)


def test_one_process_asks_nobody() -> None:
    assert broadcast_from_coordinator(Ranks(), lambda: {"a": 1}, doing=DOING, come_s=0.0, make_s=0.0) == {"a": 1}


def test_what_came_while_this_process_stood_still_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [0.0], list[float]()

    def looked() -> bool:
        looks.append(now[0])
        now[0] = SHORT_S * 2  # the process is stopped after its first look, and the others come meanwhile
        return len(looks) > 1

    monkeypatch.setattr(board, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert board.poll(looked, SHORT_S, lambda: "")
