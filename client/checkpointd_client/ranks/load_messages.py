"""The messages on the board with which the ranks agree on a load: plain data, as JSON."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import msgspec

from checkpointd.daemon.protocol.wire import RetainedSnapshot
from checkpointd.errors import ERRORS, CheckpointdError, DamagedError, MismatchError
from checkpointd.layout.log_records import CommitRecord


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """An error of one rank, which the other ranks raise as well: its class and message, the object, FQN and rank of damage, and
    all differences of a mismatch.
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
        """The error again, with `prefix` before its message."""
        kind, message = self.kind, f"{prefix}{self.message}"
        if issubclass(kind, DamagedError):
            return kind(message, key=self.key, fqn=self.fqn, rank=self.rank)
        if issubclass(kind, MismatchError):
            return kind(message, self.mismatches)
        return kind(message)


class SpooledOffer(msgspec.Struct, frozen=True, kw_only=True):
    """An undecided attempt, of which the spool of a node has the shard of one rank. `order`: by this rank's own count."""

    tag: str
    attempt: str
    step: int
    order: tuple[int, int]
    world_size: int
    nonce: str


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshots that the sidecar of one rank retains, and what the spool of its node has. `near`: the attempts
    (`<tag>/<attempt>`) of which the spool has any shard.
    """

    held: tuple[RetainedSnapshot, ...] = ()
    spooled: tuple[SpooledOffer, ...] = ()
    near: tuple[str, ...] = ()


class AskableNames(msgspec.Struct, frozen=True, kw_only=True):
    """FQNs of objects whose state one rank, or every rank, may ask for; or FQNs that one rank has a place for."""

    names: tuple[str, ...] = ()


class CandidateChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The candidate that rank 0 chose: an attempt at a tag, none (`tag` is None), or the problem that prevented a choice.

    `in_memory`: load it from the snapshots of the sidecars. `in_spool`: load it from the spools of the nodes, since it is not
    decided yet. `near`: each rank may read what its node has of it, in memory or in the spool. `commit`: its record in the
    log, and `nonce`: that of its start, so that no other rank reads the log. `share_reads`: ranks that read the same share the
    reading, as rank 0 was asked to. `is_missing`: rank 0 passed over a checkpoint of which something is not there, so a copy of
    it may be.
    """

    in_memory: bool = False
    in_spool: bool = False
    near: bool = False
    tag: str | None = None
    attempt: str = ""
    commit: CommitRecord | None = None
    nonce: str = ""
    problem: Problem | None = None
    share_reads: bool = False
    is_missing: bool = False


class Circles(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks that read the same, in circles. `token`: a word that names these circles and no others."""

    token: str = ""
    circles: tuple[tuple[int, ...], ...] = ()


class RankVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The judgment of one rank on a candidate. Without a `problem`, the rank can load it. `warning`: a line for the log.

    `unplaced`: FQNs without a place on this rank; another rank may have one. `saw_all`: whether this rank looked at the values
    of all ranks, not only at its own. `fits`: whether any value fits. `strangers`: the mismatch if none does.
    """

    problem: Problem | None = None
    unplaced: tuple[str, ...] = ()
    saw_all: bool = False
    fits: bool = False
    strangers: Problem | None = None
    warning: str = ""


class Word(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision from all verdicts. `rank`: the rank that has the `problem`; None if all ranks have it.

    `nowhere`: FQNs that no rank has a place for. `asked`: FQNs that the `answering` ranks, which did not see all values, may
    have a place for.
    """

    problem: Problem | None = None
    rank: int | None = None
    nowhere: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    answering: tuple[int, ...] = ()


Message: TypeAlias = CandidateChoice | RankVerdict | Word | Holding | AskableNames | Circles
Note = TypeVar("Note", CandidateChoice, RankVerdict, Word, Holding, AskableNames, Circles)


def written(note: Message) -> str:
    """`note` as the text to post."""
    return msgspec.json.encode(note).decode()


def read(text: str, kind: type[Note]) -> Note:
    """The note of type `kind` in a posted text."""
    return msgspec.json.decode(text, type=kind)
