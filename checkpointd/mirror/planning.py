"""Which checkpoints a mirror copies next, and which of its attempts are left over. Decides only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from checkpointd.commit.facts import Order
from checkpointd.layout.keys import DAMAGED, VERIFIED
from checkpointd.layout.manifest import Outcome
from checkpointd.mirror.news import Kind
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint

SPARED = 4
"""The newest checkpoints at the mirror that stay while the origin has a save in flight, which may refer to one of them."""


@dataclass(frozen=True, slots=True)
class Agenda:
    """The checkpoints to copy, oldest first; those that are left out because the rules of the mirror would remove them again;
    those that a record of the origin calls damaged; and attempts at the mirror that were begun and are not wanted any more.
    """

    due: tuple[Checkpoint, ...] = ()
    left_out: tuple[Checkpoint, ...] = ()
    damaged: tuple[Checkpoint, ...] = ()
    leftovers: tuple[AttemptView, ...] = ()


def missing(theirs: Sequence[AttemptView], ours: Iterable[AttemptView]) -> list[AttemptView]:
    """The checkpoints among the attempts `theirs` of the origin that the mirror may still get: it has not committed or removed
    them.
    """
    settled = {view.prefix for view in ours if view.state not in ("in-doubt", "aborted")}
    return [view for view in theirs if view.state == "committed" and view.prefix not in settled]


def planned(
    wanted: Sequence[AttemptView],
    ours: Sequence[AttemptView],
    going: Collection[str],
    *,
    everything: bool,
    reached: Order,
    tried: Mapping[str, Kind] = MappingProxyType({}),
) -> Agenda:
    """`wanted`: what `missing` found. `going`: those that the rules of the mirror would remove, by prefix (`<tag>/<attempt>`).
    `everything`: copy those, too, once. `reached`: the greatest order that was mirrored. `tried`: attempts to leave alone now,
    with the reason.
    """
    oldest_first = [*reversed(catalog.commits_of(wanted))]
    due, left_out, damaged = list[Checkpoint](), list[Checkpoint](), list[Checkpoint]()
    for checkpoint in oldest_first:
        is_new = checkpoint.outcome.order > reached
        if checkpoint.prefix in going and not (everything and is_new):
            left_out.append(checkpoint)
        elif checkpoint.read_back == "damaged":
            damaged.append(checkpoint)
        elif checkpoint.prefix not in tried:
            due.append(checkpoint)
    still = {checkpoint.prefix for checkpoint in (*due, *damaged)} | {one for one in tried if tried[one] != "removed"}
    leftovers = tuple(view for view in ours if view.state == "in-doubt" and view.prefix not in still)
    return Agenda(tuple(due), tuple(left_out), tuple(damaged), leftovers)


def outcomes_of(theirs: Iterable[AttemptView]) -> Mapping[str, Outcome]:
    """The commits among `theirs`, removed ones included, by prefix."""
    return {v.prefix: v.outcome for v in theirs if v.outcome is not None and v.outcome.outcome == "commit"}


def spared(due: Iterable[Checkpoint], theirs: Iterable[AttemptView], ours: Iterable[AttemptView]) -> set[str]:
    """The checkpoints at the mirror that no rule removes for now, by prefix: checkpoints that are `due` refer to their objects,
    or saves that are in flight at the origin may.
    """
    found = {holder for checkpoint in due for holder in checkpoint.outcome.holders}
    if any(view.state == "in-doubt" for view in theirs):
        found |= {checkpoint.prefix for checkpoint in catalog.commits_of(ours)[:SPARED]}
    return found


def newest_for_latest(ours: Iterable[AttemptView]) -> Checkpoint | None:
    """The newest checkpoint whose save asked for `latest`."""
    return next((one for one in catalog.commits_of(ours) if one.may_be_latest), None)


def damaged_of(ours: Sequence[AttemptView]) -> list[AttemptView]:
    """The attempts at the mirror that are to be healed: a record says that they are damaged, or their outcome is."""
    damaged = {one.prefix for one in catalog.checkpoints_of(ours) if one.read_back == "damaged"}
    damaged |= {view.prefix for view in ours if view.state == "unreadable" and view.read_back == "damaged"}
    return [view for view in ours if view.prefix in damaged or view.state == "damaged"]


def doubted(ours: Sequence[AttemptView], known: Mapping[str, Outcome]) -> set[str]:
    """The attempts of whose objects at the mirror one may be damaged: those to which a damaged checkpoint refers, and itself.
    `known`: the commits that the origin knows, by attempt.
    """
    found: set[str] = set()
    for view in damaged_of(ours):
        outcome = view.outcome or known.get(view.prefix)
        found |= {view.prefix, *(outcome.holders if outcome is not None else ())}
    return found


def nbytes_of(checkpoint: Checkpoint) -> int:
    """The stored bytes of a checkpoint."""
    cost = checkpoint.outcome.cost
    return cost.stored_bytes if cost is not None else 0


def given_up(tried: Mapping[str, Kind]) -> set[str]:
    """Those of the attempts `tried` that are not tried again."""
    return {prefix for prefix, kind in tried.items() if kind in ("damaged", "removed")}


def as_unread(view: AttemptView) -> AttemptView:
    """The attempt of the origin as the mirror would have it: nobody has read it back there."""
    if view.entry is not None:
        return replace(view, entry=msgspec.structs.replace(view.entry, verified=False))
    return replace(view, sizes={name: size for name, size in view.sizes.items() if name != VERIFIED})


def as_healed(view: AttemptView) -> AttemptView:
    """The attempt as it will be at the mirror if it is healed, before it was read back."""
    if view.entry is not None:
        return replace(view, entry=msgspec.structs.replace(view.entry, verified=False, damaged=False))
    return replace(view, sizes={name: size for name, size in view.sizes.items() if name not in (VERIFIED, DAMAGED)})


def has_proof(views: Iterable[AttemptView], going: Collection[str]) -> bool:
    """Whether a checkpoint that stays is recorded as read back whole."""
    return any(v.state == "committed" and v.read_back == "whole" and v.prefix not in going for v in views)
