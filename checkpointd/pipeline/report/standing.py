"""How a root stands: who runs it, what is in flight, what failed last."""

from __future__ import annotations

import msgspec

from checkpointd.errors import DamagedError
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.report.holder import Holder, newest_holder
from checkpointd.pipeline.report.listing import newest_last
from checkpointd.pipeline.report.pointer import Pointer, pointer
from checkpointd.pipeline.report.ranks import RankWord, rank_words
from checkpointd.store.base import Store

RECENT = 5
"""How many commits and how many failures are told of, the newest ones."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt without an outcome. `stale`: its job has ended, so that nobody works on it any more."""

    tag: str
    attempt: str
    stale: bool
    world_size: int | None
    object_bytes: int
    ranks: tuple[RankWord, ...]

    @property
    def votes(self) -> int:
        return sum(word.vote != "missing" for word in self.ranks)


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, its place in the order, and when it was committed."""

    tag: str
    attempt: str
    step: int
    order: tuple[int, int]
    time: str


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An aborted attempt: the class of the error, its words, the ranks at fault, and when it was decided."""

    tag: str
    attempt: str
    time: str
    code: str
    message: str
    ranks: tuple[int, ...]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What the store shows at one moment. Two of them are equal where nothing changed."""

    root: str
    holder: Holder | None
    holder_problem: str = ""
    latest: Pointer
    checkpoints: int
    commits: tuple[Commit, ...]
    damaged: tuple[str, ...]
    """Attempts with an outcome that cannot be read."""
    flights: tuple[Flight, ...]
    failures: tuple[Failure, ...]


async def standing(store: Store) -> Standing:
    """Look once."""
    attempts = [attempt for attempt in await catalog.scan(store) if attempt.sizes]
    checkpoints = catalog.checkpoints_of(attempts)
    named = await pointer(store, checkpoints)
    holder, problem = await _holder(store)
    undecided = sorted((a for a in attempts if a.state == "in-doubt"), key=newest_last, reverse=True)
    return Standing(
        root=store.url,
        holder=holder,
        holder_problem=problem,
        latest=named,
        checkpoints=len(checkpoints),
        commits=tuple(_commit(checkpoint) for checkpoint in checkpoints[:RECENT]),
        damaged=tuple(attempt.prefix for attempt in attempts if attempt.state == "damaged"),
        flights=tuple([await _flight(store, attempt, holder) for attempt in undecided]),
        failures=_failures(attempts),
    )


async def _holder(store: Store) -> tuple[Holder | None, str]:
    try:
        return await newest_holder(store), ""
    except DamagedError as error:
        return None, str(error)


async def _flight(store: Store, attempt: AttemptView, holder: Holder | None) -> Flight:
    is_newest = holder is not None and holder.epoch == attempt.attempt.epoch
    words = await rank_words(store, attempt, holder.world_size if holder and is_newest else None)
    return Flight(
        tag=attempt.tag,
        attempt=str(attempt.attempt),
        stale=holder is not None and (not is_newest or holder.life == "ended"),
        world_size=words.world_size,
        object_bytes=sum(attempt.sizes.values()),
        ranks=words.ranks,
    )


def _commit(checkpoint: Checkpoint) -> Commit:
    outcome = checkpoint.outcome
    return Commit(
        tag=checkpoint.tag,
        attempt=str(checkpoint.attempt),
        step=outcome.step,
        order=outcome.order,
        time=outcome.writer.time,
    )


def _failures(attempts: list[AttemptView]) -> tuple[Failure, ...]:
    aborted = sorted((a for a in attempts if a.state == "aborted"), key=newest_last, reverse=True)
    return tuple(
        Failure(
            tag=attempt.tag,
            attempt=str(attempt.attempt),
            time=attempt.outcome.writer.time,
            code=attempt.outcome.error.code if attempt.outcome.error else "AbortedError",
            message=attempt.outcome.error.message if attempt.outcome.error else "no reason was recorded",
            ranks=attempt.outcome.ranks,
        )
        for attempt in aborted[:RECENT]
        if attempt.outcome is not None
    )
