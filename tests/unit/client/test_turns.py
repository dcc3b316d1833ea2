"""Turns of load(): invariants N1 and N2, on torch's own Store, with a thread for each rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DamagedError, DeadlineError, MismatchError
from checkpointd_client.notes import Choice
from checkpointd_client.ranks import StoreBoard
from checkpointd_client.turns import Turns

WORLD = 3
Answer = tuple[str | None, CheckpointdError | None]


def _ranks(timeout_s: float) -> list[Turns]:
    store = HashStore()
    ranks = [Ranks(rank=rank, world_size=WORLD) for rank in range(WORLD)]
    return [Turns(StoreBoard(store, who), who, timeout_s) for who in ranks]


def _load(turns: Turns, tag: str, problem: CheckpointdError | None = None, homeless: tuple[str, ...] = ()) -> Answer:
    turn = turns.begin()
    choice = turn.chosen("candidate", lambda: Choice(tag=tag))
    return choice.tag, turn.agree("verdict", problem, homeless)


def _together(*calls: Callable[[], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def test_every_rank_hears_the_same_problem_and_its_own_words_for_it() -> None:
    a, b, c = _ranks(30.0)
    mine = MismatchError("w has another shape here")
    answers = _together(lambda: _load(a, "x", DamagedError("torn", rank=0)), lambda: _load(b, "x", mine), lambda: _load(c, "x"))
    assert [tag for tag, _ in answers] == ["x", "x", "x"]
    assert answers[1][1] is mine
    for _, error in (answers[0], answers[2]):
        assert isinstance(error, MismatchError)
        assert str(error) == "rank 1: w has another shape here"


def test_what_one_rank_has_a_place_for_is_fine_and_what_none_has_ends_the_load_on_all() -> None:
    a, b, c = _ranks(30.0)
    calls = ((a, ("w", "x")), (b, ("x",)), (c, ("v", "x")))
    for _, error in _together(*(lambda t=t, h=h: _load(t, "x", None, h) for t, h in calls)):
        assert isinstance(error, MismatchError)
        assert str(error).endswith("strict=False:\n  x")
    assert _together(*(lambda t=t, h=h[:1]: _load(t, "y", None, h) for t, h in calls)) == [("y", None)] * WORLD


def test_a_rank_that_missed_a_load_joins_the_next_one() -> None:
    a, b, c = _ranks(0.3)
    for _, error in _together(lambda: _load(a, "first"), lambda: _load(b, "first")):
        assert isinstance(error, DeadlineError)
        assert "ranks [2] did not answer" in str(error)
    c.timeout_s = a.timeout_s = b.timeout_s = 30.0
    assert _together(*(lambda t=t: _load(t, "second") for t in (a, b, c))) == [("second", None)] * WORLD


def test_a_rank_that_asked_before_rank_0_ever_did_takes_part_when_it_does() -> None:
    a, b, c = _ranks(0.2)
    with pytest.raises(DeadlineError, match=r"ranks \[0\]"):
        _load(b, "never said")
    a.timeout_s = b.timeout_s = c.timeout_s = 30.0
    assert _together(*(lambda t=t: _load(t, "said") for t in (a, b, c))) == [("said", None)] * WORLD
    assert _together(*(lambda t=t: _load(t, "again") for t in (a, b, c))) == [("again", None)] * WORLD
