"""The ranks' load() calls, numbered alike on all of them: every rank takes part in a load, or it ends with an error for all.

Invariants
  N1  What rank 0 says of a question is every rank's answer: no rank goes on where another stops.
  N2  A turn that not every rank joined is given up by rank 0, and joined by none afterwards: the next load() works again.
  N3  A rank that tries again to read keeps no other from waiting for it: whoever runs out of time finds that it does, and
      waits for as long again as it may try.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DamagedError, DeadlineError, MismatchError, UnreadableError
from checkpointd_client import mismatches, notes
from checkpointd_client.notes import Choice, Holding, Names, Problem, Verdict, Word
from checkpointd_client.ranks import Board

log = logging.getLogger("checkpointd")

_DOING = "calling load()"
_LEADER = 0


@dataclass(slots=True)
class Turns:
    """Counts the load() calls that this rank took part in."""

    board: Board
    ranks: Ranks
    timeout_s: float
    patience_s: float
    """How much longer a rank may take that reads again what could not be read (`LoadConfig`)."""
    _done: int = 0

    def begin(self) -> Turn:
        """The turn that the other ranks are in, or will be."""
        while self.board.peek(_given_up(self._done + 1)) is not None:
            self._done += 1
        return Turn(self, self._done + 1)

    def end(self, number: int) -> None:
        """No later load() of this rank belongs to turn `number`."""
        self._done = number


@dataclass(frozen=True, slots=True)
class Turn:
    """One load() call of all ranks."""

    turns: Turns
    number: int

    def chosen(self, name: str, choose: Callable[[], Choice]) -> Choice:
        """What `choose` gives on rank 0, on every rank."""
        turns, key = self.turns, self._key(name)
        if turns.ranks.rank == _LEADER:
            turns.end(self.number)
            turns.board.post(key, notes.written(choose()))
        choice = notes.read(self._read(key, [_LEADER], turns.timeout_s)[_LEADER], Choice)
        # Not before: where rank 0 has not called load() yet, its next call is this turn.
        turns.end(self.number)
        return choice

    def offer(self, name: str, note: Holding) -> None:
        """Tell rank 0 what this rank has to offer."""
        self.turns.board.post(self._key(name), notes.written(note))

    def offers(self, name: str) -> dict[int, Holding]:
        """On rank 0: what every rank offered, waited for. DeadlineError names who is missing."""
        heard = self.turns.board.read(self._key(name), None, self.turns.timeout_s, _DOING)
        return {rank: notes.read(text, Holding) for rank, text in heard.items()}

    def named_by_all(self, name: str, own: Iterable[str]) -> frozenset[str]:
        """What every rank names, on every rank; nothing where one does not answer, as the next agree() will say."""
        board, key = self.turns.board, self._key(name)
        board.post(key, notes.written(Names(names=tuple(own))))
        if self.turns.ranks.rank == _LEADER:
            try:
                heard = self._read(key, None, self.turns.timeout_s)
                common = frozenset.intersection(*(frozenset(notes.read(text, Names).names) for text in heard.values()))
            except DeadlineError:
                common = frozenset()
            board.post(f"{key}/word", notes.written(Names(names=tuple(sorted(common)))))
        # As in agree(): its word comes also where a rank is missing.
        word = self._read(f"{key}/word", [_LEADER], 2 * self.turns.timeout_s)[_LEADER]
        return frozenset(notes.read(word, Names).names)

    def tries_again(self) -> None:
        """Say that a rank of this turn reads again what could not be read (N3). From any thread."""
        self.turns.board.agree(self._key("tries-again"), "yes")

    def _read(self, key: str, ranks: list[int] | None, timeout_s: float) -> dict[int, str]:
        board = self.turns.board
        try:
            return board.read(key, ranks, timeout_s, _DOING)
        except DeadlineError:
            if board.peek(self._key("tries-again")) is None:
                raise
            return board.read(key, ranks, self.turns.patience_s, _DOING)

    def agree(
        self, name: str, problem: CheckpointdError | None, homeless: tuple[str, ...] = (), warning: str = ""
    ) -> CheckpointdError | None:
        """None where no rank has a problem; else this rank's own, or the first of the others'.

        What is `homeless` on every rank is a MismatchError on all of them. One rank tells what a mismatch is; the others say
        which one does. Where there is no problem, rank 0 logs one `warning`: its own, or the first of the others'.
        """
        board, key = self.turns.board, self._key(name)
        found = Verdict(problem=Problem.of(problem) if problem else None, homeless=homeless, warning=warning)
        board.post(key, notes.written(found))
        if self.turns.ranks.rank == _LEADER:
            board.post(f"{key}/word", notes.written(self._gathered(key)))
        # Twice as long as rank 0 waits for the slowest: its word comes also where it has to name who is missing.
        heard = self._read(f"{key}/word", [_LEADER], 2 * self.turns.timeout_s)
        word = notes.read(heard[_LEADER], Word)
        if word.problem is None:
            return None
        teller = _LEADER if word.rank is None else word.rank
        if word.problem.mismatches and self.turns.ranks.rank != teller:
            own = problem.mismatches if isinstance(problem, MismatchError) else ()
            return mismatches.told_by(teller, own or word.problem.mismatches, own=bool(own))
        if problem is not None and problem.code == word.problem.code:
            return problem
        return word.problem.error() if word.rank is None else word.problem.error(f"rank {word.rank}: ")

    def _gathered(self, key: str) -> Word:
        turns = self.turns
        try:
            heard = self._read(key, None, turns.timeout_s)
        except DeadlineError as error:
            turns.board.agree(_given_up(self.number), "yes")
            return Word(problem=Problem.of(error))
        verdicts = {rank: notes.read(text, Verdict) for rank, text in sorted(heard.items())}
        problems = {rank: verdict.problem for rank, verdict in verdicts.items() if verdict.problem is not None}
        if not problems:
            _warn_once({rank: verdict.warning for rank, verdict in verdicts.items() if verdict.warning})
            nowhere = sorted(set.intersection(*(set(verdict.homeless) for verdict in verdicts.values())))
            return Word(problem=Problem.of(_unplaced(nowhere))) if nowhere else Word()
        worst = min(problems, key=lambda rank: (_gravity(problems[rank].kind), rank))
        return Word(problem=problems[worst], rank=worst)

    def _key(self, name: str) -> str:
        return f"load/{self.number}/{name}"


def _warn_once(warnings: dict[int, str]) -> None:
    """Where ranks left different things out, the log has those of one of them, and says whose."""
    if warnings:
        rank = min(warnings)
        log.warning("%s%s", "" if rank == _LEADER else f"rank {rank}: ", warnings[rank])


def _gravity(kind: type[CheckpointdError]) -> int:
    """A mismatch is the caller's to mend and ends the load on every rank: it goes first. Damage goes last, since it makes the
    ranks take an older checkpoint, which nobody may do while another one cannot read this one (U2 in `candidates.py`).
    """
    return 2 if issubclass(kind, DamagedError) else 1 if issubclass(kind, UnreadableError) else 0


def _unplaced(fqns: list[str]) -> MismatchError:
    return mismatches.error(tuple(f"{fqn}: in the checkpoint, and nowhere in the objects of any rank" for fqn in fqns))


def _given_up(number: int) -> str:
    return f"load/{number}/given-up"
