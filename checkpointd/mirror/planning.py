"""Which checkpoints a mirror copies next, and which of its attempts are left over. Decides only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec

from checkpointd.commit.facts import Order
from checkpointd.commit.log import pinned_by, was_used
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.mirror.news import Kind
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.root_view import AttemptView, Checkpoint


@dataclass(frozen=True, slots=True)
class Agenda:
    """The checkpoints to copy, oldest first; those that are left out because the rules of the mirror would remove them again;
    those that are recorded as damaged at the origin; and attempts (`<tag>/<attempt>`) that were begun and are not wanted any
    more.
    """

    due: tuple[Checkpoint, ...] = ()
    left_out: tuple[Checkpoint, ...] = ()
    damaged: tuple[Checkpoint, ...] = ()
    leftovers: tuple[str, ...] = ()


def missing(theirs: LogState, ours: LogState) -> list[AttemptView]:
    """The checkpoints of the origin that the mirror has never had."""
    return [
        AttemptView(one)
        for name, one in theirs.attempts.items()
        if one.status == "checkpoint" and name not in ours.attempts and not was_used(ours, one)
    ]


def planned(
    wanted: Sequence[AttemptView],
    begun: Iterable[str],
    going: Collection[str],
    *,
    everything: bool,
    tried: Mapping[str, Kind] = MappingProxyType({}),
) -> Agenda:
    """`wanted`: what `missing` found. `begun`: the attempts of which objects were copied already. `going`: those that the rules
    of the mirror would remove. `everything`: copy those, too, once. `tried`: attempts to leave alone now, with the reason.
    """
    due, left_out, damaged, still = list[Checkpoint](), list[Checkpoint](), list[Checkpoint](), set[str]()
    for checkpoint in reversed(root_view.commits_of(wanted)):
        if checkpoint.prefix in going and not everything:
            left_out.append(checkpoint)
            continue
        still.update((checkpoint.prefix, *checkpoint.commit.holders))
        if checkpoint.read_back == "damaged":
            damaged.append(checkpoint)
        elif checkpoint.prefix not in tried:
            due.append(checkpoint)
    leftovers = tuple(name for name in begun if name not in still)
    return Agenda(tuple(due), tuple(left_out), tuple(damaged), leftovers)


def spared(due: Iterable[Checkpoint], theirs: LogState) -> set[str]:
    """The checkpoints that no rule removes for now: checkpoints that are `due` refer to their objects, or saves that are in
    flight at the origin may.
    """
    found = {holder for checkpoint in due for holder in checkpoint.commit.holders}
    for one in theirs.attempts.values():
        if one.status == "undecided":
            found |= pinned_by(theirs, one.base)
    return found


def reached(ours: LogState) -> Order:
    """The greatest order of a checkpoint that the mirror has or had."""
    return max((one.order for one in ours.attempts.values() if one.commit is not None), default=(0, 0))


def damaged_of(ours: LogState) -> list[LoggedAttempt]:
    """The checkpoints at the mirror that are to be healed, oldest first."""
    return sorted((one for one in ours.attempts.values() if one.status == "checkpoint" and one.damaged), key=lambda a: a.order)


def doubted(ours: LogState) -> set[str]:
    """The attempts of whose objects at the mirror one may be damaged: damaged checkpoints, and those to which they refer."""
    return {name for one in damaged_of(ours) for name in (one.attempt, *one.holders)}


def nbytes_of(checkpoint: Checkpoint) -> int:
    """The stored bytes of a checkpoint."""
    cost = checkpoint.commit.cost
    return cost.stored_bytes if cost is not None else 0


def as_unread(view: AttemptView) -> AttemptView:
    """The attempt as it will be at the mirror before it was read back there."""
    return replace(view, logged=msgspec.structs.replace(view.logged, verified=False, damaged=""))


def has_proof(ours: LogState, going: Collection[str]) -> bool:
    """Whether a checkpoint that stays is recorded as read back whole."""
    return any(a.status == "checkpoint" and a.verified and a.attempt not in going for a in ours.attempts.values())
