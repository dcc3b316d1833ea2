"""The messages on the board with which the ranks agree on a load: plain data, as JSON."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from checkpointd.daemon.protocol.wire import RetainedSnapshot
from checkpointd.errors import ERRORS, CheckpointdError, DamagedError, MismatchError


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error of one rank, for the others to raise: its class, message, for damage the object, FQN and rank, and for a
    mismatch all that it lists.
    """

    code: str
    message: str
    key: str = ""
    fqn: str = ""
    rank: int | None = None
    mismatches: tuple[str, ...] = ()

    @staticmethod
    def of(error: CheckpointdError) -> Problem:
        if isinstance(error, DamagedError):
            return Problem(code=error.code, message=str(error), key=error.key, fqn=error.fqn, rank=error.rank)
        mismatches = error.mismatches if isinstance(error, MismatchError) else ()
        return Problem(code=error.code, message=str(error), mismatches=mismatches)

    @property
    def kind(self) -> type[CheckpointdError]:
        return ERRORS.get(self.code, CheckpointdError)

    def error(self, prefix: str = "") -> CheckpointdError:
        """The same error again, its words after `prefix`."""
        kind, message = self.kind, f"{prefix}{self.message}"
        if issubclass(kind, DamagedError):
            return kind(message, key=self.key, fqn=self.fqn, rank=self.rank)
        if issubclass(kind, MismatchError):
            return kind(message, self.mismatches)
        return kind(message)


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshots that one rank's sidecar holds."""

    held: tuple[RetainedSnapshot, ...] = ()


class AskableNames(msgspec.Struct, frozen=True, kw_only=True):
    """FQNs: of the objects that one rank may ask for their state, or that every rank may; of what one rank has a place for."""

    names: tuple[str, ...] = ()


class CandidateChoice(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 chose to try next: an attempt at a tag, nothing (no tag), or the problem that choosing ran into.

    `in_memory`: from the snapshots that the sidecars hold. `passed_over`: damage to what may be newer.
    """

    in_memory: bool = False
    tag: str | None = None
    attempt: str = ""
    problem: Problem | None = None
    passed_over: tuple[Problem, ...] = ()


class RankVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank found out about a candidate; no problem: it can be loaded. `warning`: what people are to hear of it.

    `unplaced`: what it has no place for, and which may be another rank's; `saw_all`: of what all ranks saved, and not only of
    what this one did. `fits`: something fits; `strangers`: that nothing does.
    """

    problem: Problem | None = None
    unplaced: tuple[str, ...] = ()
    saw_all: bool = False
    fits: bool = False
    strangers: Problem | None = None
    warning: str = ""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 made of all verdicts; `rank`: whose problem it is, None where it is everybody's.

    `nowhere`: what no rank has a place for; `asked`: what the `answering` ranks, which did not see all, may have a place for.
    """

    problem: Problem | None = None
    rank: int | None = None
    nowhere: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    answering: tuple[int, ...] = ()


Note = TypeVar("Note", CandidateChoice, RankVerdict, Word, Holding, AskableNames)


def written(note: CandidateChoice | RankVerdict | Word | Holding | AskableNames) -> str:
    """`note` as the text to post."""
    return msgspec.json.encode(note).decode()


def read(text: str, kind: type[Note]) -> Note:
    """The note of type `kind` in a posted text."""
    return msgspec.json.decode(text, type=kind)
