"""The status of a root: its job, saves in flight, and the last failures."""

from __future__ import annotations

import msgspec

from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.root import leases, root_view
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.wholeness import Loss, missing
from checkpointd.report.holder import Holder, newest_holder
from checkpointd.report.latest import Pointer, pointer
from checkpointd.report.listing import AttemptRow, row_of
from checkpointd.report.log import look
from checkpointd.report.votes import RankWord, rank_words
from checkpointd.store.base import Store

RECENT = 5
"""A status lists this many of the newest commits, and this many of the newest failures."""


class Flight(AttemptRow, frozen=True, kw_only=True):
    """An undecided attempt. `orphaned`: as far as this machine knows, its job has ended and no daemon works at it."""

    orphaned: bool
    ranks: tuple[RankWord, ...]

    @property
    def votes(self) -> int:
        return sum(word.vote != "missing" for word in self.ranks)


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a root at one moment. Two of them are equal if nothing changed in between."""

    root: str
    holder: Holder | None
    latest: Pointer
    checkpoints: int
    left_behind: tuple[str, ...] = ()
    """The tags of those of them that are of branches that were left."""
    commits: tuple[AttemptRow, ...]
    damaged: tuple[str, ...]
    """Checkpoints that are recorded as damaged."""
    missing: dict[str, Loss]
    """What is missing of checkpoints (`<tag>/<attempt>`) that have lost objects, or that somebody removed by hand."""
    flights: tuple[Flight, ...]
    failures: tuple[AttemptRow, ...]
    log_damage: str = ""
    """Why the log could not be read to its end, so that newer attempts may be missing here; empty if it could."""


async def standing(store: Store) -> Standing:
    """The status of `store` now."""
    state, damage = await look(store)
    newest_first = sorted(state.attempts.values(), key=lambda one: one.order, reverse=True)
    checkpoints = root_view.checkpoints_of(newest_first)
    losses = await missing(store, checkpoints)
    left = [one for one in checkpoints if one.prefix not in losses or not losses[one.prefix].is_removed]
    holder, latest = await newest_holder(store, state), await pointer(store, state, damage)
    return Standing(
        root=store.url,
        holder=holder,
        latest=latest,
        checkpoints=len(left),
        left_behind=tuple(c.tag for c in left if c.left_behind),
        commits=tuple(row_of(one, losses.get(one.prefix), named=latest.tag) for one in left[:RECENT]),
        damaged=tuple(c.prefix for c in left if c.read_back == "damaged"),
        missing=losses,
        flights=tuple([await _flight(store, one, holder) for one in newest_first if one.status == "undecided"]),
        failures=tuple([row_of(one) for one in newest_first if one.abort is not None][:RECENT]),
        log_damage=damage,
    )


async def _flight(store: Store, attempt: LoggedAttempt, holder: Holder | None) -> Flight:
    is_newest = holder is not None and holder.start == attempt.id.start
    words = await rank_words(store, attempt, holder.world_size if holder and is_newest else None)
    return Flight(
        **msgspec.structs.asdict(row_of(attempt, words=words)),
        orphaned=holder is not None
        and (not (is_newest or holder.mirrors) or holder.life == "ended")
        and await leases.worker_of(store, attempt.prefix, Sight()) is None,
        ranks=words.ranks,
    )
