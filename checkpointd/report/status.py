"""The status of a root: its job, saves in flight, and the last failures."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from checkpointd.errors import DamagedError
from checkpointd.pipeline.root import catalog, leases
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.wholeness import Lost, Wholeness, directory_of
from checkpointd.report.holder import Holder, newest_holder
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.listing import newest_last
from checkpointd.report.votes import RankWord, rank_words
from checkpointd.store.base import Store

RECENT = 5
"""A status lists this many of the newest commits, and this many of the newest failures."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt without an outcome. `orphaned`: as far as this machine knows, its job has ended and no daemon works at it."""

    tag: str
    attempt: str
    orphaned: bool
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


class AbortedAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An aborted attempt: the class of the error and its message, the ranks at fault, and the time of the abort."""

    tag: str
    attempt: str
    time: str
    code: str
    message: str
    ranks: tuple[int, ...]


class Incomplete(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that has lost objects, or that somebody removed by hand."""

    tag: str
    attempt: str
    lost: tuple[Lost, ...]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a root at one moment. Two of them are equal if nothing changed in between."""

    root: str
    holder: Holder | None
    holder_problem: str = ""
    latest: Pointer
    checkpoints: int
    left_behind: tuple[str, ...] = ()
    """The tags of those of them that are of branches that were left."""
    commits: tuple[Commit, ...]
    damaged: tuple[str, ...]
    """Attempts with a damaged outcome."""
    copies: tuple[str, ...] = ()
    """Copies of tags' directories, each in words."""
    unreadable: tuple[str, ...]
    """Attempts with an outcome that cannot be read now."""
    incomplete: tuple[Incomplete, ...]
    flights: tuple[Flight, ...]
    failures: tuple[AbortedAttempt, ...]


async def standing(store: Store) -> Standing:
    """The status of `store` now."""
    attempts = [attempt for attempt in await catalog.scan(store) if attempt.has_objects]
    checkpoints = catalog.checkpoints_of(attempts)
    wholeness = Wholeness(store, attempts)
    removed = await wholeness.seen_abandoned()
    left = [checkpoint for checkpoint in checkpoints if checkpoint.prefix not in removed]
    named = await pointer(store, checkpoints, wholeness)
    holder, problem = await _holder(store)
    undecided = sorted((a for a in attempts if a.state == "in-doubt"), key=newest_last, reverse=True)
    return Standing(
        root=store.url,
        holder=holder,
        holder_problem=problem,
        latest=named,
        checkpoints=len(left),
        left_behind=tuple(c.tag for c in left if c.left_behind),
        commits=tuple(
            Commit(tag=c.tag, attempt=str(c.attempt), step=c.outcome.step, order=c.outcome.order, time=c.outcome.writer.time)
            for c in left[:RECENT]
        ),
        damaged=tuple(attempt.prefix for attempt in attempts if attempt.state == "damaged" and not attempt.is_copy),
        copies=tuple(attempt.damage or "" for attempt in attempts if attempt.is_copy),
        unreadable=tuple(attempt.prefix for attempt in attempts if attempt.state == "unreadable"),
        incomplete=await _incomplete(wholeness, attempts, checkpoints, await catalog.vanished(store)),
        flights=tuple([await _flight(store, attempt, holder) for attempt in undecided]),
        failures=_failures(attempts),
    )


async def _incomplete(
    wholeness: Wholeness,
    attempts: Sequence[AttemptView],
    checkpoints: Sequence[Checkpoint],
    vanished: Sequence[AttemptView],
) -> tuple[Incomplete, ...]:
    """The checkpoints that have lost objects or are gone, as far as listings and outcomes show: no vote is read."""
    views = {attempt.prefix: attempt for attempt in attempts}
    found = [(c.tag, c.attempt, await wholeness.lost(views[c.prefix])) for c in checkpoints]
    found += [(v.tag, v.attempt, (directory_of(v.tag),)) for v in vanished]
    return tuple(Incomplete(tag=tag, attempt=str(attempt), lost=lost) for tag, attempt, lost in found if lost)


async def _holder(store: Store) -> tuple[Holder | None, str]:
    try:
        return await newest_holder(store), ""
    except DamagedError as error:
        return None, str(error)


async def _flight(store: Store, attempt: AttemptView, holder: Holder | None) -> Flight:
    is_newest = holder is not None and holder.start == attempt.attempt.start
    words = await rank_words(store, attempt, holder.world_size if holder and is_newest else None)
    return Flight(
        tag=attempt.tag,
        attempt=str(attempt.attempt),
        orphaned=holder is not None
        and (not (is_newest or holder.mirrors) or holder.life == "ended")
        and await leases.worker_of(store, attempt.prefix, Sight()) is None,
        world_size=words.world_size,
        object_bytes=sum(attempt.sizes.values()),
        ranks=words.ranks,
    )


def _failures(attempts: list[AttemptView]) -> tuple[AbortedAttempt, ...]:
    aborted = sorted((a for a in attempts if a.state == "aborted"), key=newest_last, reverse=True)
    return tuple(
        AbortedAttempt(
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
