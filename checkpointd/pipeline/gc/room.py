"""Tells from the root's log alone whether there is room for another attempt: nobody looks at the objects.

An attempt is *beside* the checkpoints that stay if it is undecided, since it is announced just before its first object; if it
was aborted or removed, and objects of it may be left that can go; if it is a checkpoint that retention removes next; or if it
is one that stays only until a newer one is verified. Attempts are *alike* if the commit of one may remove another: with
retention rules, all attempts at the root; without rules, the attempts of one tag.

Invariant
  TIDY-2  The coordinator begins an attempt if at most SPARE alike attempts are beside the checkpoints that stay then, or at
      most SMALL_MAX ones that take at most SMALL_BYTES together. The new attempt counts, and so does the one by which other
      ranks may lead. What did not go in the last removal, although nobody needs it, does not count. Each start counts for
      itself, so while a daemon finishes the saves of an older one there may be twice as many.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from checkpointd.commit.facts import Order
from checkpointd.commit.log import pinned_by
from checkpointd.commit.retention import KEEPS_NONE, Retention, choose
from checkpointd.layout.log_records import LoggedAttempt, LogState
from checkpointd.pipeline.gc.collect import Kept, sweepable
from checkpointd.pipeline.gc.retire import age_s
from checkpointd.pipeline.shard import AttemptInfo

SPARE = 3
"""The number of alike attempts that may be beside the checkpoints that stay."""
SMALL_MAX = 64
SMALL_BYTES = 256 << 20
"""So many attempts may be there instead of SPARE if they take so few bytes together. Small saves then do not wait until a
removal has looked at a long history."""

_NOTHING: Kept = {}
_NO_SIZES: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class RoomUse:
    """The attempts beside the checkpoints that stay, in one state of the log."""

    undecided: Sequence[LoggedAttempt] = ()
    going: Sequence[LoggedAttempt] = ()
    """What a removal would remove, unless an undecided attempt may refer to it."""
    surplus: Sequence[LoggedAttempt] = ()
    """Checkpoints that stay only until a newer one is verified."""
    pinned: Collection[str] = ()
    """What undecided attempts may refer to (LOG-10)."""
    unknown_metric: str | None = None
    """Why the rules remove nothing (RETENTION-5)."""
    is_shown: bool = False
    """Whether directories show checkpoints. If a person removes one, its checkpoint goes."""

    @property
    def removable(self) -> frozenset[str]:
        """What a removal can remove now."""
        return frozenset(one.prefix for one in self.going if one.prefix not in self.pinned)


def room_use(state: LogState, rules: Retention, keeps_before: Order = KEEPS_NONE, kept: Kept = _NOTHING) -> RoomUse:
    """What is beside the checkpoints that stay by `rules`. Checkpoints before `keeps_before` stay (RETENTION-6). `kept`: as for
    `sweep`.
    """
    attempts = state.attempts.values()
    undecided = [one for one in attempts if one.status == "undecided"]
    choice = choose(attempts, rules, age_s=age_s, keeps_before=keeps_before)
    return RoomUse(
        undecided,
        [*sweepable(state, kept), *(state.attempts[name] for name, _ in choice.going)],
        [state.attempts[name] for name in choice.surplus],
        frozenset(name for one in undecided for name in pinned_by(state, one.base)),
        choice.unknown_metric,
        any(one.commit.shown_at for one in attempts if one.status == "checkpoint"),
    )


def has_room(
    found: RoomUse,
    rules: Retention,
    info: AttemptInfo,
    nbytes: float,
    begun: Mapping[str, float] = _NO_SIZES,
    *,
    stays: Collection[str] = (),
    only_undecided: bool = False,
) -> bool:
    """Whether the coordinator may begin the attempt `info` of `nbytes` bytes (TIDY-2). `begun`: the attempts that it has begun
    and that have not ended, announced or not, with their bytes. `stays`: what did not go. `only_undecided`: what could be
    removed does not count, since nobody removes it now.
    """

    def alike(names: Iterable[str]) -> set[str]:
        return {name for name in names if not rules.keeps_all or name.rpartition("/")[0] == info.tag} - {info.prefix}

    undecided = alike(one.prefix for one in found.undecided) - begun.keys()
    # Those of this start belong to ranks that lead, or to a lost coordinator that this one has replaced.
    led = {one.prefix for one in found.undecided if one.id.start == info.attempt.start} & undecided
    removable = {} if only_undecided else {one.prefix: one for one in (*found.going, *found.surplus) if one.prefix not in stays}
    counted = alike(removable) | alike(begun) | (undecided - led)
    more = 1 + max(len(led), 1 if info.world_size > 1 else 0)
    known = {**{name: _nbytes(one) for name, one in removable.items()}, **begun}
    if len(counted) + more <= SPARE:
        return True
    total = sum(known.get(name) or nbytes for name in counted) + more * nbytes
    return len(counted) + more <= SMALL_MAX and total <= SMALL_BYTES


def _nbytes(one: LoggedAttempt) -> int:
    """The bytes that it has written; 0 if that is not known."""
    return 0 if one.committed is None or one.commit.cost is None else one.commit.cost.written_bytes
