"""Turns of load(): invariants ROUND-1 and ROUND-2, on torch's own Store, with a thread for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest
from torch.distributed import HashStore

from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DamagedError, DeadlineError, MismatchError, UnreadableError
from checkpointd_client.ranks import mismatches
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.ranks.load_messages import CandidateChoice, Holding
from checkpointd_client.ranks.load_rounds import LoadRounds

WORLD = 3
LONG_S, SHORT_S = 60.0, 0.3
Answer = tuple[str | None, CheckpointdError | None]


def _ranks() -> list[LoadRounds]:
    store = HashStore()
    ranks = [Ranks(rank=rank, world_size=WORLD) for rank in range(WORLD)]
    return [LoadRounds(StoreBoard(store, who), who, LONG_S, LONG_S) for who in ranks]


class Impatient(StoreBoard):
    """Gives up soon on the word of rank 2, which does not come, but not on what comes sooner or later."""

    def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
        if ranks is not None:
            return super().read(key, ranks, timeout_s, doing)
        super().read(key, [0, 1], timeout_s, doing)
        return super().read(key, ranks, SHORT_S, doing)


def _without_the_last(turns: LoadRounds) -> LoadRounds:
    """Rank 0, with a board that is impatient."""
    turns.board = Impatient(turns.board.store, turns.ranks)  # type: ignore[attr-defined]  # it is a StoreBoard
    return turns


def _load(turns: LoadRounds, tag: str, problem: CheckpointdError | None = None, warning: str = "") -> Answer:
    turn = turns.begin()
    choice = turn.chosen("candidate", lambda: CandidateChoice(tag=tag))
    return choice.tag, turn.agree("verdict", problem, warning)


@dataclass(frozen=True)
class Fitting:
    """How a candidate fits one rank."""

    unplaced: tuple[str, ...] = ()
    own: tuple[str, ...] | None = None
    """What this rank saved, where it looked at nothing else."""
    fits: bool = True
    strangers: MismatchError | None = None

    @property
    def saw_all(self) -> bool:
        return self.own is None

    def placed(self, fqns: Iterable[str]) -> tuple[str, ...]:
        assert self.own is not None, "asked once more although it saw all"
        return tuple(fqn for fqn in fqns if fqn in self.own and fqn not in self.unplaced)


Judged = tuple[CheckpointdError | None, tuple[str, ...]]


def _judge(ranks: Iterable[LoadRounds], fits: Iterable[Fitting | None], *, strict: bool) -> list[Judged]:
    def judge(turns: LoadRounds, fit: Fitting | None) -> Judged:
        turn = turns.begin()
        turn.chosen("candidate", lambda: CandidateChoice(tag="x"))
        return turn.judge("verdict", DamagedError("torn") if fit is None else None, fit, strict=strict)

    with ThreadPoolExecutor(WORLD) as threads:
        return [one.result() for one in [threads.submit(judge, *pair) for pair in zip(ranks, fits, strict=True)]]


def _together(*calls: Callable[[], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def test_every_rank_hears_the_same_problem_and_its_own_words_for_it() -> None:
    a, b, c = _ranks()
    mine = MismatchError("w has another shape here")
    answers = _together(lambda: _load(a, "x", DamagedError("torn", rank=0)), lambda: _load(b, "x", mine), lambda: _load(c, "x"))
    assert [tag for tag, _ in answers] == ["x", "x", "x"]
    assert answers[1][1] is mine
    for _, error in (answers[0], answers[2]):
        assert isinstance(error, MismatchError)
        assert str(error) == "rank 1: w has another shape here"


def _told(rank: int, error: CheckpointdError | None, fqn: str) -> None:
    assert isinstance(error, MismatchError)
    assert error.mismatches == (f"{fqn}: in the checkpoint, and nowhere in the objects of any rank",)
    listed = f"all values of the objects would come from the checkpoint. They are:\n  {error.mismatches[0]}"
    assert str(error).endswith("rank 0, which lists them" if rank else listed)


def test_what_one_rank_has_a_place_for_is_fine_and_what_none_has_ends_the_load_on_all_or_is_said() -> None:
    ranks = _ranks()
    fits = [Fitting(unplaced) for unplaced in (("w", "x"), ("x",), ("v", "x"))]
    for rank, (error, _) in enumerate(_judge(ranks, fits, strict=True)):
        _told(rank, error, "x")
    assert _judge(ranks, fits, strict=False) == [(None, ("x",))] * WORLD
    fits = [Fitting(fit.unplaced[:1]) for fit in fits]
    assert _judge(ranks, fits, strict=True) == _judge(ranks, fits, strict=False) == [(None, ())] * WORLD


def test_a_rank_that_saw_its_own_part_alone_is_asked_what_it_has_a_place_for() -> None:
    """Rank 0 lost a layer, x, and looked at all; what the others saved themselves has a place there, but for y."""
    fits = [Fitting(("w", "x", "y")), Fitting((), own=("w",)), Fitting(("y",), own=("y",))]
    ranks = _ranks()
    assert _judge(ranks, fits, strict=False) == [(None, ("x", "y"))] * WORLD
    fits[0], fits[2] = Fitting(("w", "x")), Fitting((), own=("y",))
    for rank, (error, _) in enumerate(_judge(ranks, fits, strict=True)):
        _told(rank, error, "x")


def test_of_a_part_that_one_rank_has_what_lies_in_it_and_has_no_place_there_is_said() -> None:
    ranks = _ranks()
    fits = [Fitting(("opt",)), Fitting(("opt.a", "opt.b")), Fitting(("opt.a",))]
    assert _judge(ranks, fits, strict=False) == [(None, ("opt.a",))] * WORLD
    assert _judge(ranks, [*fits[:2], Fitting(("opt",), own=("opt",))], strict=False) == [(None, ("opt.a", "opt.b"))] * WORLD
    assert _judge(ranks, [Fitting(("opt",)), *fits[:1], fits[0]], strict=False) == [(None, ("opt",))] * WORLD


def test_a_rank_that_nothing_fits_is_fine_where_something_fits_another() -> None:
    ranks = _ranks()
    nothing = Fitting(("w",), fits=False, strangers=MismatchError("nothing fits", ("new: missing from the checkpoint",)))
    assert _judge(ranks, [nothing, Fitting(), nothing], strict=False) == [(None, ())] * WORLD
    empty = Fitting(("w",), fits=False)
    (at_0, _), (at_1, _), (at_2, _) = _judge(ranks, [empty, nothing, nothing], strict=False)
    assert at_1 is nothing.strangers
    for error, own in ((at_0, False), (at_2, True)):
        assert isinstance(error, MismatchError)
        assert error.mismatches == nothing.strangers.mismatches  # type: ignore[union-attr]  # it has one
        assert ("here, too" in str(error)) == own


def test_a_rank_with_a_problem_ends_it_before_what_others_have_no_place_for() -> None:
    for error, nowhere in _judge(_ranks(), [Fitting(("w",), own=("v",)), None, Fitting(("w",))], strict=False):
        assert isinstance(error, DamagedError)
        assert nowhere == ()


def test_a_rank_that_is_gone_when_it_is_asked_is_named() -> None:
    a, b, c = _ranks()

    class Gone(Fitting):
        def placed(self, fqns: Iterable[str]) -> tuple[str, ...]:
            raise KeyboardInterrupt

    class Asking(StoreBoard):
        """Gives up soon on those who are asked."""

        def read(self, key: str, ranks: list[int] | None, timeout_s: float, doing: str) -> dict[int, str]:
            return super().read(key, ranks, SHORT_S if key.endswith("/placed") else timeout_s, doing)

    a.board = Asking(a.board.store, a.ranks)  # type: ignore[attr-defined]  # it is a StoreBoard

    with ThreadPoolExecutor(WORLD) as threads:
        fits = (Fitting(("x",)), Gone(own=()), Fitting(("x",)))
        calls = [threads.submit(_judge, [t], [f], strict=True) for t, f in zip((a, b, c), fits, strict=True)]
        for one in (calls[0], calls[2]):
            ((error, _),) = one.result()
            assert isinstance(error, DeadlineError)
            assert "rank 1 did not answer" in str(error)
        assert isinstance(calls[1].exception(), KeyboardInterrupt)


@pytest.mark.parametrize(
    ("warnings", "told"),
    [
        (("mine", "yours", ""), ["mine"]),
        (("", "yours", "theirs"), ["rank 1: yours"]),
        (("", "", ""), []),
    ],
)
def test_what_ranks_left_out_is_said_once_by_rank_0(
    warnings: tuple[str, ...], told: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    calls = [partial(_load, turns, "x", warning=words) for turns, words in zip(_ranks(), warnings, strict=True)]
    assert _together(*calls) == [("x", None)] * WORLD
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == told


def test_every_rank_hears_what_all_of_them_name() -> None:
    a, b, c = (turns.begin() for turns in _ranks())
    with ThreadPoolExecutor(WORLD) as threads:
        named = ((a, ("app", "ema")), (b, ("ema", "app")), (c, ("app",)))
        found = [threads.submit(turn.named_by_all, "askable", names) for turn, names in named]
        assert [one.result() for one in found] == [{"app"}] * WORLD


def test_nothing_is_named_by_all_where_one_rank_does_not_answer() -> None:
    a, b, _ = _ranks()
    turns = [_without_the_last(a).begin(), b.begin()]
    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(turn.named_by_all, "askable", ("app",)) for turn in turns]:
            assert one.result() == frozenset()
        for end in [threads.submit(turn.agree, "verdict", None) for turn in turns]:
            assert isinstance(end.result(), DeadlineError)


@pytest.mark.parametrize("question", ["offers", "names"])
def test_a_rank_that_did_not_answer_once_is_not_waited_for_again_in_the_same_round(question: str) -> None:
    a, b, c = _ranks()
    early, late = [_without_the_last(a).begin(), b.begin()], c.begin()
    with ThreadPoolExecutor(WORLD) as threads:
        if question == "names":
            for one in [threads.submit(turn.named_by_all, "askable", ()) for turn in early]:
                one.result()
        else:
            for turn in early:
                turn.offer("held", Holding())
            with pytest.raises(DeadlineError):
                early[0].offers("held")
        for end in [threads.submit(turn.agree, "verdict", None) for turn in (*early, late)]:
            error = end.result()
            assert isinstance(error, DeadlineError)
            assert f"rank 2 did not answer within {SHORT_S} s" in str(error)


def test_a_rank_that_missed_a_load_joins_the_next_one() -> None:
    a, b, c = _ranks()
    patient = a.board
    for _, error in _together(lambda: _load(_without_the_last(a), "first"), lambda: _load(b, "first")):
        assert isinstance(error, DeadlineError)
        assert "rank 2 did not answer" in str(error)
    a.board = patient
    assert _together(*(lambda t=t: _load(t, "second") for t in (a, b, c))) == [("second", None)] * WORLD


def test_a_rank_that_asked_before_rank_0_ever_did_takes_part_when_it_does() -> None:
    a, b, c = _ranks()
    b.timeout_s = SHORT_S
    with pytest.raises(DeadlineError, match="rank 0"):
        _load(b, "never said")
    b.timeout_s = LONG_S
    assert _together(*(lambda t=t: _load(t, "said") for t in (a, b, c))) == [("said", None)] * WORLD
    assert _together(*(lambda t=t: _load(t, "again") for t in (a, b, c))) == [("again", None)] * WORLD


def test_one_rank_tells_the_first_ten_mismatches_and_the_others_say_which() -> None:
    a, b, c = _ranks()
    of_b, of_c = (
        tuple(f"{name}{n}: missing from the checkpoint" for n in range(count)) for name, count in (("b", 25), ("c", 1))
    )
    calls = ((a, None), (b, mismatches.error(of_b)), (c, mismatches.error(of_c)))
    at_a, at_b, at_c = (error for _, error in _together(*(lambda t=t, p=p: _load(t, "x", p) for t, p in calls)))
    assert isinstance(at_a, MismatchError)
    assert isinstance(at_b, MismatchError)
    assert isinstance(at_c, MismatchError)
    assert (at_a.mismatches, at_b.mismatches, at_c.mismatches) == (of_b, of_b, of_c)
    assert "differ in 25 places" in str(at_b)
    assert [line.strip() for line in str(at_b).splitlines()[1:]] == list(of_b[:10])
    assert str(at_a) == "nothing was loaded: the checkpoint and the objects differ in 25 places on rank 1, which lists them"
    assert str(at_c).endswith("differ in 1 place here, too, and rank 1 lists its own")


def test_a_rank_that_cannot_read_keeps_all_from_going_past_what_another_finds_damaged() -> None:
    a, b, c = _ranks()
    calls = ((a, DamagedError("torn", rank=0)), (b, None), (c, UnreadableError("EIO")))
    for _, error in _together(*(lambda t=t, p=p: _load(t, "x", p) for t, p in calls)):
        assert isinstance(error, UnreadableError)


class Watched(StoreBoard):
    """Says when somebody who ran out of time asks whether a rank reads again."""

    def peek(self, key: str) -> str | None:
        if key.endswith("tries-again"):
            ASKED.release()
        return super().peek(key)


ASKED = threading.Semaphore(0)


def test_the_others_wait_for_a_rank_that_reads_again() -> None:
    """ROUND-3: they run out of time twice, rank 0 for the verdicts and rank 1 for the word, and hear it all the same."""
    a, b, c = _ranks()
    reads_again = threading.Event()
    for turns in (a, b):
        turns.board = Watched(turns.board.store, turns.ranks)  # type: ignore[attr-defined]  # they are StoreBoards

    def fast(turns: LoadRounds) -> Answer:
        turn = turns.begin()
        choice = turn.chosen("candidate", lambda: CandidateChoice(tag="x"))
        assert reads_again.wait(LONG_S)
        turns.timeout_s = SHORT_S
        return choice.tag, turn.agree("verdict", None)

    def slow() -> Answer:
        turn = c.begin()
        choice = turn.chosen("candidate", lambda: CandidateChoice(tag="x"))
        turn.tries_again()
        reads_again.set()
        for _ in range(2):
            assert ASKED.acquire(timeout=LONG_S)
        return choice.tag, turn.agree("verdict", None)

    assert _together(lambda: fast(a), lambda: fast(b), slow) == [("x", None)] * WORLD
