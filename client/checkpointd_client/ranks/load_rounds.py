"""Load rounds: the ranks' load() calls, numbered alike on all ranks. All take part, or the round is an error for all.

Invariants
  ROUND-1  What rank 0 says of a question is every rank's answer: no rank goes on where another stops.
  ROUND-2  A turn that not every rank joined is given up by rank 0, and joined by none afterwards: the next load() works again.
  ROUND-3  A rank that tries again to read keeps no other from waiting for it: whoever runs out of time finds that it does, and
      waits for as long again as it may try.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DamagedError, DeadlineError, MismatchError, UnreadableError
from checkpointd_client.ranks import load_messages, mismatches
from checkpointd_client.ranks.board import COORDINATOR, Board
from checkpointd_client.ranks.load_messages import AskableNames, CandidateChoice, Holding, Problem, RankVerdict, Word

log = logging.getLogger("checkpointd")

_DOING = "calling load()"


@dataclass(slots=True)
class LoadRounds:
    """Counts the load() calls that this rank took part in."""

    board: Board
    ranks: Ranks
    timeout_s: float
    patience_s: float
    """How much longer a rank may take that reads again what could not be read (`LoadConfig`)."""
    _done: int = 0
    unanswered: tuple[int, DeadlineError] | None = None
    """On rank 0: the newest round in which it waited for a rank in vain, with the error that names the rank."""

    def begin(self) -> LoadRound:
        """The turn that the other ranks are in, or will be."""
        while self.board.peek(_given_up(self._done + 1)) is not None:
            self._done += 1
        return LoadRound(self, self._done + 1)

    def end(self, number: int) -> None:
        """No later load() of this rank belongs to turn `number`."""
        self._done = number


class Fit(Protocol):
    """How a candidate fits the objects of one rank (`restore.Restoration`)."""

    @property
    def unplaced(self) -> tuple[str, ...]: ...

    @property
    def saw_all(self) -> bool: ...

    @property
    def fits(self) -> bool: ...

    @property
    def strangers(self) -> MismatchError | None: ...

    def placed(self, fqns: Iterable[str]) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True)
class LoadRound:
    """One load() call of all ranks."""

    turns: LoadRounds
    number: int

    def chosen(self, name: str, choose: Callable[[], CandidateChoice]) -> CandidateChoice:
        """What `choose` gives on rank 0, on every rank."""
        turns, key = self.turns, self._key(name)
        if turns.ranks.rank == COORDINATOR:
            turns.end(self.number)
            turns.board.post(key, load_messages.written(choose()))
        choice = load_messages.read(self._read(key, [COORDINATOR], turns.timeout_s)[COORDINATOR], CandidateChoice)
        # Not before: where rank 0 has not called load() yet, its next call is this turn.
        turns.end(self.number)
        return choice

    def offer(self, name: str, note: Holding) -> None:
        """Tell rank 0 what this rank has to offer."""
        self.turns.board.post(self._key(name), load_messages.written(note))

    def offers(self, name: str) -> dict[int, Holding]:
        """On rank 0: what every rank offered, waited for. DeadlineError names who is missing."""
        heard = self.turns.board.read(self._key(name), None, self.turns.timeout_s, _DOING)
        return {rank: load_messages.read(text, Holding) for rank, text in heard.items()}

    def named_by_all(self, name: str, own: Iterable[str]) -> frozenset[str]:
        """The names that all ranks give, on every rank. If a rank does not answer: none, and the next verdict gives the round up."""
        board, key = self.turns.board, self._key(name)
        board.post(key, load_messages.written(AskableNames(names=tuple(own))))
        if self.turns.ranks.rank == COORDINATOR:
            try:
                heard = self._read(key, None, self.turns.timeout_s)
                common = frozenset.intersection(
                    *(frozenset(load_messages.read(text, AskableNames).names) for text in heard.values())
                )
            except DeadlineError as error:
                common, self.turns.unanswered = frozenset(), (self.number, error)
            board.post(f"{key}/word", load_messages.written(AskableNames(names=tuple(sorted(common)))))
        # As in agree(): its word comes also where a rank is missing.
        word = self._read(f"{key}/word", [COORDINATOR], 2 * self.turns.timeout_s)[COORDINATOR]
        return frozenset(load_messages.read(word, AskableNames).names)

    def tries_again(self) -> None:
        """Say that a rank of this turn reads again what could not be read (ROUND-3). From any thread."""
        self.turns.board.agree(self._key("tries-again"), "yes")

    def _read(self, key: str, ranks: list[int] | None, timeout_s: float) -> dict[int, str]:
        board = self.turns.board
        try:
            return board.read(key, ranks, timeout_s, _DOING)
        except DeadlineError:
            if board.peek(self._key("tries-again")) is None:
                raise
            return board.read(key, ranks, self.turns.patience_s, _DOING)

    def agree(self, name: str, problem: CheckpointdError | None, warning: str = "") -> CheckpointdError | None:
        """None where no rank has a problem; else this rank's own, or the first of the others'.

        One rank tells what a mismatch is; the others say which one does. Where there is no problem, rank 0 logs one `warning`:
        its own, or the first of the others'.
        """
        return self._error(self._word(name, RankVerdict(problem=_noted(problem), warning=warning), strict=False), problem)

    def judge(
        self, name: str, problem: CheckpointdError | None, fit: Fit | None, *, strict: bool
    ) -> tuple[CheckpointdError | None, tuple[str, ...]]:
        """The same of a candidate, and what of it no rank has a place for: with `strict`, that is a MismatchError on all ranks.

        Without, it is one that nothing of the candidate fits on any rank.
        """
        found = RankVerdict(problem=_noted(problem))
        if fit is not None:
            found = RankVerdict(
                problem=found.problem,
                unplaced=fit.unplaced,
                saw_all=fit.saw_all,
                fits=fit.fits,
                strangers=_noted(fit.strangers),
            )
        word = self._word(name, found, strict=strict)
        if word.answering:
            word = self._answered(name, word, fit, strict=strict)
        return self._error(word, problem or (fit.strangers if fit is not None else None)), word.nowhere

    def _answered(self, name: str, word: Word, fit: Fit | None, *, strict: bool) -> Word:
        """The word once the ranks that are to answer have said what they have a place for."""
        board, key, rank = self.turns.board, self._key(name), self.turns.ranks.rank
        if fit is not None and rank in word.answering:
            board.post(f"{key}/placed", load_messages.written(AskableNames(names=fit.placed(word.asked))))
        if rank == COORDINATOR:
            board.post(f"{key}/settled", load_messages.written(self._settled(key, word, strict=strict)))
        return self._said(f"{key}/settled")

    def _error(self, word: Word, problem: CheckpointdError | None) -> CheckpointdError | None:
        """The error on this rank, whose own `problem` that may be."""
        if word.problem is None:
            return None
        teller = COORDINATOR if word.rank is None else word.rank
        if word.problem.mismatches and self.turns.ranks.rank != teller:
            own = problem.mismatches if isinstance(problem, MismatchError) else ()
            return mismatches.told_by(teller, own or word.problem.mismatches, own=bool(own))
        if problem is not None and problem.code == word.problem.code:
            return problem
        return word.problem.error() if word.rank is None else word.problem.error(f"rank {word.rank}: ")

    def _word(self, name: str, found: RankVerdict, *, strict: bool) -> Word:
        """What rank 0 made of all verdicts."""
        board, key = self.turns.board, self._key(name)
        board.post(key, load_messages.written(found))
        if self.turns.ranks.rank == COORDINATOR:
            board.post(f"{key}/word", load_messages.written(self._gathered(key, strict=strict)))
        return self._said(f"{key}/word")

    def _said(self, key: str) -> Word:
        # Twice as long as rank 0 waits for the slowest: its word comes also where it has to name who is missing.
        return load_messages.read(self._read(key, [COORDINATOR], 2 * self.turns.timeout_s)[COORDINATOR], Word)

    def _gathered(self, key: str, *, strict: bool) -> Word:
        unanswered = self.turns.unanswered
        if unanswered is not None and unanswered[0] == self.number:
            return self._given_up(unanswered[1])  # a rank gets the time-out once, not once per question
        try:
            heard = self._read(key, None, self.turns.timeout_s)
        except DeadlineError as error:
            return self._given_up(error)
        verdicts = {rank: load_messages.read(text, RankVerdict) for rank, text in sorted(heard.items())}
        problems = {rank: verdict.problem for rank, verdict in verdicts.items() if verdict.problem is not None}
        if problems:
            worst = min(problems, key=lambda rank: (_gravity(problems[rank].kind), rank))
            return Word(problem=problems[worst], rank=worst)
        strangers = {rank: verdict.strangers for rank, verdict in verdicts.items() if verdict.strangers is not None}
        if strangers and not any(verdict.fits for verdict in verdicts.values()):
            return Word(problem=strangers[min(strangers)], rank=min(strangers))
        _warn_once({rank: verdict.warning for rank, verdict in verdicts.items() if verdict.warning})
        unplaced = _unplaced_by(verdicts.values())
        partial = {rank: frozenset(verdict.unplaced) for rank, verdict in verdicts.items() if not verdict.saw_all}
        if all(mismatches.stands_in(fqn, own) for own in set(partial.values()) for fqn in unplaced):
            return _nowhere(unplaced, strict=strict)
        return Word(asked=tuple(unplaced), answering=tuple(partial))

    def _settled(self, key: str, word: Word, *, strict: bool) -> Word:
        try:
            heard = self._read(f"{key}/placed", list(word.answering), self.turns.timeout_s)
        except DeadlineError as error:
            return self._given_up(error)
        placed = {fqn for text in heard.values() for fqn in load_messages.read(text, AskableNames).names}
        return _nowhere([fqn for fqn in word.asked if fqn not in placed], strict=strict)

    def _given_up(self, error: DeadlineError) -> Word:
        self.turns.board.agree(_given_up(self.number), "yes")
        return Word(problem=Problem.of(error))

    def _key(self, name: str) -> str:
        return f"load/{self.number}/{name}"


def _noted(problem: CheckpointdError | None) -> Problem | None:
    return None if problem is None else Problem.of(problem)


def _unplaced_by(verdicts: Iterable[RankVerdict]) -> list[str]:
    """What a rank has no place for, nor any other one of those that saw all."""
    found = {frozenset(verdict.unplaced): None for verdict in verdicts}
    knowing = {frozenset(verdict.unplaced): None for verdict in verdicts if verdict.saw_all}
    unplaced = sorted(frozenset().union(*found))
    for places in knowing:
        unplaced = [fqn for fqn in unplaced if mismatches.stands_in(fqn, places)]
    return unplaced


def _nowhere(fqns: list[str], *, strict: bool) -> Word:
    """The word that no rank has a place for `fqns`, of which those that lie below others go without saying."""
    found = frozenset(fqns)
    told = [fqn for fqn in fqns if not mismatches.stands_in(fqn.rpartition(".")[0], found)]
    return Word(problem=Problem.of(_unplaced(told))) if strict and told else Word(nowhere=tuple(told))


def _warn_once(warnings: dict[int, str]) -> None:
    """Where ranks left different things out, the log has those of one of them, and says whose."""
    if warnings:
        rank = min(warnings)
        log.warning("%s%s", "" if rank == COORDINATOR else f"rank {rank}: ", warnings[rank])


def _gravity(kind: type[CheckpointdError]) -> int:
    """A mismatch is the caller's to mend and ends the load on every rank: it goes first. Damage goes last, since it makes the
    ranks take an older checkpoint, which nobody may do while another one cannot read this one (CANDIDATE-2 in `candidates.py`).
    """
    return 2 if issubclass(kind, DamagedError) else 1 if issubclass(kind, UnreadableError) else 0


def _unplaced(fqns: list[str]) -> MismatchError:
    return mismatches.error(tuple(f"{fqn}: in the checkpoint, and nowhere in the objects of any rank" for fqn in fqns))


def _given_up(number: int) -> str:
    return f"load/{number}/given-up"
