"""The status of a root: its job, saves in flight, and the last failures."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.root import leases, root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.wholeness import Lost, is_removed, seen_at_a_glance
from checkpointd.report.holder import Holder, newest_holder
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.log import look
from checkpointd.report.votes import RankWord, rank_words
from checkpointd.store.base import Store

RECENT = 5
"""A status lists this many of the newest commits, and this many of the newest failures."""


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """An undecided attempt. `orphaned`: as far as this machine knows, its job has ended and no daemon works at it."""

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
    latest: Pointer
    checkpoints: int
    left_behind: tuple[str, ...] = ()
    """The tags of those of them that are of branches that were left."""
    commits: tuple[Commit, ...]
    damaged: tuple[str, ...]
    """Checkpoints that are recorded as damaged."""
    incomplete: tuple[Incomplete, ...]
    flights: tuple[Flight, ...]
    failures: tuple[AbortedAttempt, ...]
    log_damage: str = ""
    """Why the log could not be read to its end, so that newer attempts may be missing here; empty if it could."""


async def standing(store: Store) -> Standing:
    """The status of `store` now."""
    state, damage = await look(store)
    attempts = state.attempts.values()
    checkpoints = root_view.checkpoints_of(attempts)
    missing = await seen_at_a_glance(store, checkpoints)
    left = [checkpoint for checkpoint in checkpoints if not is_removed(missing.get(checkpoint.prefix, ()))]
    holder = await newest_holder(store, state)
    undecided = sorted((one for one in attempts if one.status == "undecided"), key=lambda one: one.order, reverse=True)
    return Standing(
        root=store.url,
        holder=holder,
        latest=await pointer(store, state, damage),
        checkpoints=len(left),
        left_behind=tuple(c.tag for c in left if c.left_behind),
        commits=tuple(
            Commit(tag=c.tag, attempt=str(c.id), step=c.commit.step, order=c.commit.order, time=c.commit.writer.time)
            for c in left[:RECENT]
        ),
        damaged=tuple(c.prefix for c in left if c.read_back == "damaged"),
        incomplete=tuple(
            Incomplete(tag=one.tag, attempt=str(one.id), lost=missing[one.prefix])
            for one in checkpoints
            if one.prefix in missing
        ),
        flights=tuple([await _flight(store, one, holder) for one in undecided]),
        failures=_failures(attempts),
        log_damage=damage,
    )


async def _flight(store: Store, attempt: LoggedAttempt, holder: Holder | None) -> Flight:
    is_newest = holder is not None and holder.start == attempt.id.start
    sizes = await root_view.sizes_of(store, attempt.prefix)
    words = await rank_words(store, attempt, sizes, holder.world_size if holder and is_newest else None)
    return Flight(
        tag=attempt.tag,
        attempt=str(attempt.id),
        orphaned=holder is not None
        and (not (is_newest or holder.mirrors) or holder.life == "ended")
        and await leases.worker_of(store, attempt.prefix, Sight()) is None,
        world_size=words.world_size,
        object_bytes=sum(sizes.values()),
        ranks=words.ranks,
    )


def _failures(attempts: Iterable[LoggedAttempt]) -> tuple[AbortedAttempt, ...]:
    aborted = sorted((one for one in attempts if one.status == "aborted"), key=lambda one: one.order, reverse=True)
    return tuple(
        AbortedAttempt(
            tag=one.tag,
            attempt=str(one.id),
            time=abort.writer.time,
            code=abort.error.code,
            message=abort.error.message,
            ranks=abort.ranks,
        )
        for one in aborted[:RECENT]
        if (abort := one.abort) is not None
    )
