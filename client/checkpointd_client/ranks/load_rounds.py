"""Load rounds: the load() calls of all ranks, numbered alike on every rank. If a rank stays away, the round fails for all.

Invariants
  ROUND-1  Rank 0 decides each question for all ranks, so all of them go on, or all of them stop.
  ROUND-2  If a rank stays away from a round, rank 0 gives the round up. No rank joins it afterwards, so the next load() works.
  ROUND-3  A rank that reads again after a failure says so on the board. If the wait of another rank times out, that rank finds
      the message, and waits once more, for as long as the first may read again.
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
from checkpointd_client.ranks.load_messages import (
    AskableNames,
    CandidateChoice,
    Circles,
    Holding,
    Message,
    Note,
    Problem,
    RankVerdict,
    Word,
)

log = logging.getLogger("checkpointd")

_DOING = "calling load()"


@dataclass(slots=True)
class LoadRounds:
    """Counts the load rounds that are over on this rank."""

    board: Board
    ranks: Ranks
    timeout_s: float
    patience_s: float
    """How much longer a rank may take if it reads again after a failure (`LoadConfig`)."""
    _done: int = 0
    unanswered: tuple[int, DeadlineError] | None = None
    """On rank 0: the newest round in which a rank did not answer, with the error that names the rank."""

    def begin(self) -> LoadRound:
        """Join the round that the other ranks are in, or will begin."""
        while self.board.peek(_given_up(self._done + 1)) is not None:
            self._done += 1
        return LoadRound(self, self._done + 1)

    def end(self, number: int) -> None:
        """Count round `number` as over: the next load() of this rank belongs to a later one."""
        self._done = number


class Fit(Protocol):
    """How a candidate fits the objects of one rank (`restore.plan.Restoration`)."""

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

    rounds: LoadRounds
    number: int

    def chosen(self, name: str, choose: Callable[[], CandidateChoice]) -> CandidateChoice:
        """Rank 0 calls `choose`; every rank gets the result."""
        rounds, key = self.rounds, self._key(name)
        if self._is_coordinator:
            rounds.end(self.number)
            self._post(key, choose())
        choice = self._from_coordinator(key, CandidateChoice, rounds.timeout_s)
        # Not earlier: if rank 0 has not called load() yet, its next call belongs to this round.
        rounds.end(self.number)
        return choice

    def offer(self, name: str, note: Holding) -> None:
        """Tell rank 0 the snapshots of this rank's sidecar."""
        self._post(self._key(name), note)

    def offers(self, name: str) -> dict[int, Holding]:
        """On rank 0: wait for the offers of all ranks. DeadlineError names the missing ranks."""
        try:
            heard = self.rounds.board.read(self._key(name), None, self.rounds.timeout_s, _DOING)
        except DeadlineError as error:
            self.rounds.unanswered = (self.number, error)
            raise
        return {rank: load_messages.read(text, Holding) for rank, text in heard.items()}

    def named_by_all(self, name: str, own: Iterable[str]) -> frozenset[str]:
        """The names that every rank has given; none if a rank does not answer, and then the next verdict gives the round up."""
        key = self._key(name)
        self._post(key, AskableNames(names=tuple(own)))
        if self._is_coordinator:
            try:
                heard = self._read(key, None, self.rounds.timeout_s)
                common = frozenset.intersection(
                    *(frozenset(load_messages.read(text, AskableNames).names) for text in heard.values())
                )
            except DeadlineError as error:
                common, self.rounds.unanswered = frozenset(), (self.number, error)
            self._post(f"{key}/word", AskableNames(names=tuple(sorted(common))))
        return frozenset(self._said(f"{key}/word", AskableNames).names)

    def circles(self, name: str, reads: str, form: Callable[[dict[int, str]], Circles]) -> Circles:
        """Rank 0 forms circles from the `reads` of all ranks; every rank gets them. There are none if a rank does not answer,
        and then the next verdict gives the round up.
        """
        key = self._key(name)
        self._post(key, AskableNames(names=(reads,)))
        if self._is_coordinator:
            try:
                heard = self._read(key, None, self.rounds.timeout_s)
                found = form({rank: load_messages.read(text, AskableNames).names[0] for rank, text in heard.items()})
            except DeadlineError as error:
                found, self.rounds.unanswered = Circles(), (self.number, error)
            self._post(f"{key}/word", found)
        return self._said(f"{key}/word", Circles)

    def tries_again(self) -> None:
        """Say that a rank of this round reads again after a failure (ROUND-3). Any thread may call this."""
        self.rounds.board.agree(self._key("tries-again"), "yes")

    @property
    def _is_coordinator(self) -> bool:
        return self.rounds.ranks.rank == COORDINATOR

    def _post(self, key: str, note: Message) -> None:
        self.rounds.board.post(key, load_messages.written(note))

    def _read(self, key: str, ranks: list[int] | None, timeout_s: float) -> dict[int, str]:
        board = self.rounds.board
        try:
            return board.read(key, ranks, timeout_s, _DOING)
        except DeadlineError:
            if board.peek(self._key("tries-again")) is None:
                raise
            return board.read(key, ranks, self.rounds.patience_s, _DOING)

    def _from_coordinator(self, key: str, kind: type[Note], timeout_s: float) -> Note:
        return load_messages.read(self._read(key, [COORDINATOR], timeout_s)[COORDINATOR], kind)

    def _said(self, key: str, kind: type[Note]) -> Note:
        # Twice as long as rank 0 waits for the others: it also answers if it has to name missing ranks.
        return self._from_coordinator(key, kind, 2 * self.rounds.timeout_s)

    def agree(self, name: str, problem: CheckpointdError | None, warning: str = "") -> CheckpointdError | None:
        """None if no rank has a problem; else this rank's own, or the first problem of another rank.

        One rank lists the differences of a mismatch; the errors of the other ranks name that rank. Without a problem, rank 0
        logs one `warning`: its own, or the first one of the other ranks.
        """
        return self._error(self._word(name, RankVerdict(problem=_noted(problem), warning=warning), strict=False), problem)

    def judge(
        self, name: str, problem: CheckpointdError | None, fit: Fit | None, *, strict: bool
    ) -> tuple[CheckpointdError | None, tuple[str, ...]]:
        """Agree on a candidate. Returns the error, as `agree` does, and the FQNs that have no place on any rank.

        With `strict`, such FQNs are a MismatchError on all ranks. Without, it is a MismatchError if nothing of the candidate
        fits on any rank.
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
        """Rank 0's decision after the `answering` ranks have named the FQNs that they have a place for."""
        key = self._key(name)
        if fit is not None and self.rounds.ranks.rank in word.answering:
            self._post(f"{key}/placed", AskableNames(names=fit.placed(word.asked)))
        if self._is_coordinator:
            self._post(f"{key}/settled", self._settled(key, word, strict=strict))
        return self._said(f"{key}/settled", Word)

    def _error(self, word: Word, problem: CheckpointdError | None) -> CheckpointdError | None:
        """The error to raise on this rank: its own `problem` if that is of the same class."""
        if word.problem is None:
            return None
        teller = COORDINATOR if word.rank is None else word.rank
        if word.problem.mismatches and self.rounds.ranks.rank != teller:
            own = problem.mismatches if isinstance(problem, MismatchError) else ()
            return mismatches.told_by(teller, own or word.problem.mismatches, own=bool(own))
        if problem is not None and problem.code == word.problem.code:
            return problem
        return word.problem.error() if word.rank is None else word.problem.error(f"rank {word.rank}: ")

    def _word(self, name: str, found: RankVerdict, *, strict: bool) -> Word:
        """Rank 0's decision from the verdicts of all ranks."""
        key = self._key(name)
        self._post(key, found)
        if self._is_coordinator:
            self._post(f"{key}/word", self._gathered(key, strict=strict))
        return self._said(f"{key}/word", Word)

    def _gathered(self, key: str, *, strict: bool) -> Word:
        unanswered = self.rounds.unanswered
        if unanswered is not None and unanswered[0] == self.number:
            return self._given_up(unanswered[1])  # a rank gets the time-out once, not once per question
        try:
            heard = self._read(key, None, self.rounds.timeout_s)
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
            heard = self._read(f"{key}/placed", list(word.answering), self.rounds.timeout_s)
        except DeadlineError as error:
            return self._given_up(error)
        placed = {fqn for text in heard.values() for fqn in load_messages.read(text, AskableNames).names}
        return _nowhere([fqn for fqn in word.asked if fqn not in placed], strict=strict)

    def _given_up(self, error: DeadlineError) -> Word:
        self.rounds.board.agree(_given_up(self.number), "yes")
        return Word(problem=Problem.of(error))

    def _key(self, name: str) -> str:
        return f"load/{self.number}/{name}"


def _noted(problem: CheckpointdError | None) -> Problem | None:
    return None if problem is None else Problem.of(problem)


def _unplaced_by(verdicts: Iterable[RankVerdict]) -> list[str]:
    """The FQNs that some rank has no place for, and no rank that saw all has one either."""
    found = {frozenset(verdict.unplaced): None for verdict in verdicts}
    knowing = {frozenset(verdict.unplaced): None for verdict in verdicts if verdict.saw_all}
    unplaced = sorted(frozenset().union(*found))
    for places in knowing:
        unplaced = [fqn for fqn in unplaced if mismatches.stands_in(fqn, places)]
    return unplaced


def _nowhere(fqns: list[str], *, strict: bool) -> Word:
    """The decision that no rank has a place for `fqns`. An FQN below another one of them is not listed."""
    found = frozenset(fqns)
    told = tuple(fqn for fqn in fqns if not mismatches.stands_in(fqn.rpartition(".")[0], found))
    if not strict or not told:
        return Word(nowhere=told)
    differences = tuple(mismatches.unexpected(fqn, " of any rank") for fqn in told)
    return Word(problem=Problem.of(mismatches.error(differences)))


def _warn_once(warnings: dict[int, str]) -> None:
    """Log the warning of one rank, with its number: the others may have left out other values."""
    if warnings:
        rank = min(warnings)
        log.warning("%s%s", "" if rank == COORDINATOR else f"rank {rank}: ", warnings[rank])


def _gravity(kind: type[CheckpointdError]) -> int:
    """The order of problems: the smallest number counts. A mismatch comes first, since only the caller can mend it. Damage
    comes last: it makes the ranks take an older checkpoint, which they must not do while one of them cannot read this one
    (CANDIDATE-1 in `candidates.py`).
    """
    return 2 if issubclass(kind, DamagedError) else 1 if issubclass(kind, UnreadableError) else 0


def _given_up(number: int) -> str:
    return f"load/{number}/given-up"
