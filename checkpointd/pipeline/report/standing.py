"""How a root stands: who runs it, what is in flight, what failed last."""

from __future__ import annotations

import msgspec

from checkpointd.errors import DamagedError
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import AttemptView
from checkpointd.pipeline.report.holder import Holder, newest_holder
from checkpointd.pipeline.report.listing import newest_last
from checkpointd.pipeline.report.pointer import Pointer, pointer
from checkpointd.pipeline.report.ranks import RankWord, rank_words
from checkpointd.store.base import Store

FAILURES = 5
"""How many failed attempts are shown."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt without an outcome. `stale`: of an older epoch, so that nobody works on it any more."""

    tag: str
    attempt: str
    stale: bool
    world_size: int | None
    object_bytes: int
    ranks: tuple[RankWord, ...]

    @property
    def votes(self) -> int:
        return sum(word.vote != "missing" for word in self.ranks)


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
    latest_step: int | None
    latest_time: str | None
    checkpoints: int
    damaged: tuple[str, ...]
    """Attempts with an outcome that cannot be read."""
    flights: tuple[Flight, ...]
    failures: tuple[Failure, ...]


async def standing(store: Store) -> Standing:
    """Look once."""
    attempts = [attempt for attempt in await catalog.scan(store) if attempt.sizes]
    checkpoints = catalog.checkpoints_of(attempts)
    named = await pointer(store, checkpoints)
    newest = next((c for c in checkpoints if c.tag == named.tag), None)
    holder, problem = await _holder(store)
    undecided = sorted((a for a in attempts if a.state == "in-doubt"), key=newest_last, reverse=True)
    return Standing(
        root=store.url,
        holder=holder,
        holder_problem=problem,
        latest=named,
        latest_step=newest.outcome.step if newest else None,
        latest_time=newest.outcome.writer.time if newest else None,
        checkpoints=len(checkpoints),
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
        stale=holder is not None and attempt.attempt.epoch < holder.epoch,
        world_size=words.world_size,
        object_bytes=sum(attempt.sizes.values()),
        ranks=words.ranks,
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
        for attempt in aborted[:FAILURES]
        if attempt.outcome is not None
    )
