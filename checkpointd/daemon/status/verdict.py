"""The verdict on a root, in one word and one sentence, from its status. Pure. Page and command line show the same.

Invariants
  VERDICT-1  A verdict changes only when something happens, or does not happen in time. So its reason never contains an age.
  VERDICT-2  The unknown never counts as bad: no save is late unless two intervals between saves are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import get_args

import msgspec

from checkpointd.commit.machine import SUPERSEDED, Phase
from checkpointd.daemon.status.model import RankStatus, RootStatus, RootVerdict, State
from checkpointd.daemon.status.save_groups import SaveGroup, attempts_of
from checkpointd.phrases import rank_runs

INTERVALS = 8
"""The number of last intervals between saves that tell when the next save is due."""
PATIENCE = 1.5
"""A save is late after so many times the longest of those intervals,"""
PATIENCE_S = 30.0
"""and at least so many seconds after the longest."""
REASON_MAX = 300


@dataclass(frozen=True, slots=True)
class Rhythm:
    """How often saves come: the seconds between them, when the next one is due, and when it is late (since 1970)."""

    every_s: float
    due_at: float
    late_at: float


def judged(root: RootStatus, now: float) -> RootStatus:
    """`root` with its verdict, with the time of its next save, and only with the ranks of the last run here."""
    root = msgspec.structs.replace(root, ranks=tuple(members_of(root)))
    rhythm = rhythm_of(root)
    due = rhythm.due_at if rhythm is not None and any(rank.connected for rank in root.ranks) else None
    every = rhythm.every_s if rhythm is not None else None
    return msgspec.structs.replace(root, every_s=every, next_due_at=due, verdict=_verdict(root, rhythm, now))


def attention(root: RootStatus) -> tuple[int, bool, str]:
    """Sorts roots: the most urgent first, then those that save now, then by name."""
    return get_args(State).index(root.verdict.state), not root.in_flight, root.root


def _verdict(root: RootStatus, rhythm: Rhythm | None, now: float) -> RootVerdict:
    failed = failures_of(root)
    connected = [rank for rank in root.ranks if rank.connected]
    lost = [rank.rank for rank in root.ranks if not rank.connected and not rank.left_well]
    if root.problem is not None:
        return _said("unreadable", f"The root cannot be looked at: {root.problem.message}")
    if root.checkpoints and root.checkpoints[0].read_back == "damaged":
        return _said("damaged", f"The newest checkpoint, {root.checkpoints[0].tag}, was read back and is damaged")
    if not root.ranks:
        return _said("idle", "No trainer of this node has come since the daemon began")
    if not connected and not lost:
        if not failed:
            return _said("closed", "The trainers of this node closed it")
        return _said("closed", f"The trainers of this node closed it; {_failure(failed)}", mood="doubt")
    gone = f"the trainer{'s' if len(lost) > 1 else ''} of {rank_runs(lost)} went without closing the Checkpointer"
    if failed and connected:
        return _said("failing", _sentence(f"{_failure(failed)}; {gone}" if lost else _failure(failed)))
    if lost:
        return _said("trainers gone", _sentence(gone))
    if rhythm is not None and now > rhythm.late_at:
        return _said("late", f"The next save is overdue: the last ones came every {about(rhythm.every_s)}")
    return _said("healthy", _healthy(root))


_MOODS = {"late": "doubt", "healthy": "good", "closed": "quiet", "idle": "quiet"}


def _said(state: State, reason: str, *, mood: str = "") -> RootVerdict:
    short = reason if len(reason) <= REASON_MAX else f"{reason[: REASON_MAX - 1]}…"
    return msgspec.convert({"state": state, "mood": mood or _MOODS.get(state, "bad"), "reason": short}, RootVerdict)


_INLINE = {"refused": "refused it", "lost": "could not be reached"}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _healthy(root: RootStatus) -> str:
    if root.newest_committed_at is None:
        return "A first save is in flight" if root.in_flight else "The trainers are connected; nothing was saved yet"
    began = max((rank.since for rank in root.ranks if rank.connected), default=0.0)
    if root.newest_committed_at < began:
        return "The trainers are connected; they have not saved since they began"
    last = next((save for save in reversed(root.recent) if save.phase == "committed"), None)
    if last is not None and last.inline is not None:
        why = _INLINE[last.inline.reason]
        return f"The last save was committed; the trainers persisted it themselves, since the sidecar {why}"
    return "The last save was committed"


def _failure(failed: list[SaveGroup]) -> str:
    """`the last 3 saves did not commit: rank 2 failed: no space is left`. `failed`: newest first."""
    (phase, message), saves = next(iter(failed[0].causes.items()))
    which = "the last save" if len(failed) == 1 else f"the last {len(failed)} saves"
    return f"{which} did not commit: {rank_runs(save.rank for save in saves)} {phase}: {message}"


def failures_of(root: RootStatus) -> list[SaveGroup]:
    """The saves that did not commit since the last one that did, newest first. Skipped and superseded ones do not count."""
    found: list[SaveGroup] = []
    for attempt in reversed(attempts_of(root)):
        phases = {save.phase for save in attempt.saves if save.ended_at is not None}
        ended = max((save.ended_at for save in attempt.saves if save.ended_at is not None), default=0.0)
        if "committed" in phases or (root.newest_committed_at or 0.0) > ended > 0.0:
            break
        if phases - {Phase.SKIPPED.value, SUPERSEDED} and attempt.causes:
            found.append(attempt)
    return found


def members_of(root: RootStatus) -> list[RankStatus]:
    """The ranks of the last run on this node, without ranks that only an earlier run had here.

    Epochs tell runs apart. They begin again if a root is removed and made again, so the last one need not be the highest.
    """
    begun = [rank for rank in root.ranks if rank.epoch is not None]
    newest = max(begun, key=lambda rank: (rank.connected, rank.since), default=None)
    return [rank for rank in root.ranks if newest is None or rank.connected or _is_with(rank, newest)]


def _is_with(rank: RankStatus, newest: RankStatus) -> bool:
    """Whether `rank`, whose trainer has gone, was in the run of `newest`, or went after that run had begun."""
    if rank.epoch is not None:
        return rank.epoch == newest.epoch
    return rank.gone_at is None or rank.gone_at >= newest.since


def rhythm_of(root: RootStatus) -> Rhythm | None:
    """The rhythm of the saves; None if fewer than two intervals are known."""
    began = max((rank.since for rank in root.ranks if rank.connected), default=0.0)
    times = sorted(attempt.began_at for attempt in attempts_of(root))
    if len(_gaps(times, began)) < 2:
        times = sorted(filter(None, (checkpoint.committed_at for checkpoint in root.checkpoints)))
    gaps = _gaps(times, began)
    if len(gaps) < 2:
        return None
    last, longest = max(times[-1], began), max(gaps)
    return Rhythm(median(gaps), last + median(gaps), last + max(PATIENCE * longest, longest + PATIENCE_S))


def _gaps(times: list[float], began: float) -> list[float]:
    """The last intervals, without the one in which the trainers were restarted."""
    return [b - a for a, b in pairwise(times) if not a < began <= b and b > a][-INTERVALS:]


def about(seconds: float) -> str:
    """A rough length of time: `45 s`, `10 min`, `2.5 h`."""
    for unit, length, least in (("d", 86400.0, 1.95), ("h", 3600.0, 1.95), ("min", 60.0, 1.95)):
        if seconds >= least * length:
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 9.95 or round(value, 1) == round(value) else f"{value:.1f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
