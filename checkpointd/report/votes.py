"""The votes of an attempt, and the objects that each rank left in it."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Literal, TypeAlias

import msgspec

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, UnreadableError
from checkpointd.layout.keys import object_key, object_rank, vote_name, vote_rank
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ErrorReport, Inline, Vote, WriterIdentity
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.phrases import rank_runs
from checkpointd.pipeline.identity import seconds_of
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.wholeness import counted_votes
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store

Ballot: TypeAlias = Literal["yes", "no", "missing", "unreadable"]

READS = 16
"""Votes that are read at once."""


class RankWord(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of an attempt. `object_bytes` counts all its objects, and the space reserved for unfinished ones."""

    rank: int
    vote: Ballot
    writer: WriterIdentity | None = None
    error: ErrorReport | None = None
    """Why the rank voted no, or why its vote cannot be read."""
    raw_bytes: int | None = None
    stored_bytes: int | None = None
    object_bytes: int = 0
    seconds: PhaseSeconds = PhaseSeconds()
    """The seconds that each part of the rank's save took, as far as its vote tells."""
    inline: Inline | None = None
    """Why the trainer persisted this part itself although it uses a sidecar; None if it did not."""


class RankWords(msgspec.Struct, frozen=True, kw_only=True):
    """All ranks of an attempt; `world_size` and `step` are None if neither the log nor a vote tells them."""

    world_size: int | None
    step: int | None
    ranks: tuple[RankWord, ...]

    def missing(self) -> list[int]:
        return [word.rank for word in self.ranks if word.vote == "missing"]

    def has_votes(self) -> bool:
        return len(self.missing()) < len(self.ranks)

    def why(self) -> str:
        """Why an undecided attempt is not decided."""
        if self.world_size is None:
            return "it is not decided, and no vote gives the number of ranks"
        missing = self.missing()
        votes = f"and there is no vote of {rank_runs(missing)}" if missing else "although every rank has voted"
        return f"it is not decided, {votes}"

    def raw_bytes(self) -> int | None:
        """Bytes of all tensors before encoding; None if a vote is missing or cannot be read."""
        return _total([word.raw_bytes for word in self.ranks])

    def stored_bytes(self) -> int | None:
        return _total([word.stored_bytes for word in self.ranks])

    def object_bytes(self) -> int:
        return sum(word.object_bytes for word in self.ranks)


def _total(parts: list[int | None]) -> int | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None


async def rank_words(store: Store, attempt: LoggedAttempt, world_size: int | None = None) -> RankWords:
    """Look at the objects and votes of `attempt`. `world_size`, that of its start, is used if the attempt has none."""
    sizes = await root_view.sizes_of(store, attempt.prefix)
    votes = await _votes_of(store, attempt, sizes)
    told = attempt.committed or next((vote for _, vote in sorted(votes.items()) if isinstance(vote, Vote)), None)
    size = (told.world_size if told else 0) or world_size or None
    step = told.step if told else attempt.step
    nbytes: dict[int, int] = {}
    for name, object_bytes in sizes.items():
        if (rank := object_rank(name)) is not None:
            nbytes[rank] = nbytes.get(rank, 0) + object_bytes
    ranks = sorted({*range(size or 0), *votes, *nbytes})
    return RankWords(
        world_size=size,
        step=step if step >= 0 else None,
        ranks=tuple(_word(attempt, rank, votes.get(rank), nbytes.get(rank, 0)) for rank in ranks),
    )


async def _votes_of(store: Store, attempt: LoggedAttempt, names: Iterable[str]) -> dict[int, Vote | CheckpointdError]:
    """The votes of `attempt` by rank; in place of an unreadable vote, the error. Of a commit, the votes that it counted."""
    if attempt.status == "checkpoint":
        return await counted_votes(store, attempt.commit)
    votes: dict[int, Vote | CheckpointdError] = {}

    async def read(rank: int) -> None:
        try:
            votes[rank] = await root_view.read_vote(store, object_key(attempt.prefix, vote_name(rank)))
        except (DamagedError, NotFoundError, UnreadableError) as error:
            votes[rank] = error

    await run_workers([partial(read, rank) for name in names if (rank := vote_rank(name)) is not None], READS)
    return votes


def _word(attempt: LoggedAttempt, rank: int, vote: Vote | CheckpointdError | None, nbytes: int) -> RankWord:
    if vote is None:
        return RankWord(rank=rank, vote="missing", object_bytes=nbytes)
    if not isinstance(vote, Vote):
        return RankWord(rank=rank, vote="unreadable", error=ErrorReport.of(vote), object_bytes=nbytes)
    is_yes = vote.vote == "yes"
    return RankWord(
        rank=rank,
        vote=vote.vote,
        writer=vote.writer,
        error=vote.error,
        raw_bytes=vote.raw_bytes if is_yes else None,
        stored_bytes=vote.stored_bytes if is_yes else None,
        seconds=_seconds(attempt, vote),
        object_bytes=nbytes,
        inline=vote.inline,
    )


def _seconds(attempt: LoggedAttempt, vote: Vote) -> PhaseSeconds:
    """The seconds in the vote, and the time from the vote to the decision, by the clocks of the machines that wrote them."""
    decided = attempt.decision
    if vote.seconds == PhaseSeconds() or decided is None:
        return vote.seconds
    voted, ended = seconds_of(vote.writer.time), seconds_of(decided.writer.time)
    if voted is None or ended is None:
        return vote.seconds
    return msgspec.structs.replace(vote.seconds, waiting=max(0.0, round(ended - voted, 3)))
