"""Which checkpoints a mirror copies next, and which of its attempts are left over. Decides only."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import msgspec

from checkpointd.commit.branches import commits_of
from checkpointd.commit.facts import Order
from checkpointd.commit.log import pinned_by, was_used
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.mirror.news import Kind


@dataclass(frozen=True, slots=True)
class Agenda:
    """The checkpoints to copy, oldest first; those that are left out because the rules of the mirror would remove them again;
    those that are recorded as damaged at the origin; and attempts (`<tag>/<attempt>`) that were begun and are not wanted any
    more.
    """

    due: tuple[LoggedAttempt, ...] = ()
    left_out: tuple[LoggedAttempt, ...] = ()
    damaged: tuple[LoggedAttempt, ...] = ()
    leftovers: tuple[str, ...] = ()


def missing(theirs: LogState, ours: LogState) -> list[LoggedAttempt]:
    """The checkpoints of the origin that the mirror has never had."""
    return [
        one
        for name, one in theirs.attempts.items()
        if one.status == "checkpoint" and name not in ours.attempts and not was_used(ours, name, one.n)
    ]


def planned(
    wanted: Sequence[LoggedAttempt],
    begun: Iterable[str],
    going: Collection[str],
    *,
    everything: bool,
    tried: Mapping[str, Kind] = MappingProxyType({}),
) -> Agenda:
    """`wanted`: what `missing` found. `begun`: the attempts of which objects were copied already. `going`: those that the rules
    of the mirror would remove. `everything`: copy those, too, once. `tried`: attempts to leave alone now, with the reason.
    """
    due, left_out, damaged, still = list[LoggedAttempt](), list[LoggedAttempt](), list[LoggedAttempt](), set[str]()
    for checkpoint in reversed(commits_of(wanted)):
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


def spared(due: Iterable[LoggedAttempt], theirs: LogState) -> set[str]:
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
    return max((one.order for one in ours.attempts.values() if one.committed), default=(0, 0))


def damaged_of(ours: LogState) -> list[LoggedAttempt]:
    """The checkpoints at the mirror that are to be healed, oldest first."""
    return sorted((one for one in ours.attempts.values() if one.status == "checkpoint" and one.damaged), key=lambda a: a.order)


def doubted(ours: LogState) -> set[str]:
    """The attempts of whose objects at the mirror one may be damaged: damaged checkpoints, and those to which they refer."""
    return {name for one in damaged_of(ours) for name in (one.prefix, *one.holders)}


def nbytes_of(checkpoint: LoggedAttempt) -> int:
    """The stored bytes of a checkpoint."""
    cost = checkpoint.commit.cost
    return cost.stored_bytes if cost is not None else 0


def as_unread(checkpoint: LoggedAttempt) -> LoggedAttempt:
    """The `checkpoint` as it will be at the mirror before it was read back there."""
    return msgspec.structs.replace(checkpoint, verified=False, damaged="")


def has_proof(ours: LogState, going: Collection[str]) -> bool:
    """Whether a checkpoint that stays is recorded as read back whole."""
    return any(a.status == "checkpoint" and a.verified and a.prefix not in going for a in ours.attempts.values())
