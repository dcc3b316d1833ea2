"""The verdict on a root, in one word and one sentence, from its status. Pure. Page and command line show the same.

Invariants
  VERDICT-1  A verdict changes only when something happens, or does not happen in time. So its reason has times, and no age.
  VERDICT-2  The unknown never counts as bad: no save is late unless two intervals between saves are known, and no commit unless
      it is known how long one takes.
  VERDICT-3  Every save that did not commit counts. The reason names what is in flight, and since when nothing was committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import get_args

import msgspec

from checkpointd.daemon.status.model import RankStatus, RootStatus, RootVerdict, State
from checkpointd.daemon.status.save_groups import SaveGroup, attempts_of, uncommitted
from checkpointd.phrases import lasting, rank_runs
from checkpointd.times import utc

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
    asked = uncommitted(root)
    failed = [attempt for attempt in asked if not attempt.live]
    fails = not all(attempt.was_left_out for attempt in failed)
    connected = [rank for rank in root.ranks if rank.connected]
    lost = [rank.rank for rank in root.ranks if not rank.connected and not rank.left_well]
    if root.problem is not None:
        return _said("unreadable", f"The root cannot be looked at: {root.problem.message}")
    if root.checkpoints and root.checkpoints[0].read_back == "damaged":
        return _said("damaged", f"The newest checkpoint, {root.checkpoints[0].tag}, was read back and is damaged")
    if not root.ranks:
        return _said("idle", "No trainer of this node has come since the daemon began")
    flying = _flying([attempt for attempt in asked if attempt.live])
    since = _since(root, asked)
    if not connected and not lost:
        if not fails:
            return _said("closed", "The trainers of this node closed it", flying)
        return _said("closed", f"The trainers of this node closed it; {_failure(failed)}", since, flying, mood="doubt")
    gone = f"the trainer{'s' if len(lost) > 1 else ''} of {rank_runs(lost)} went without closing the Checkpointer"
    if fails and connected:
        return _said("failing", _failure(failed), *([gone] if lost else []), since, flying)
    if lost:
        return _said("trainers gone", gone, since if fails else "", flying)
    if asked and _commit_is_late(root, asked, now):
        return _said("late", f"{since}, although {_number(len(asked))} asked for", _left_out(failed), flying)
    if rhythm is not None and now > rhythm.late_at:
        return _said("late", f"The next save is overdue: the last ones came every {about(rhythm.every_s)}", flying)
    return _said("healthy", _healthy(root, asked), _left_out(failed), flying)


_MOODS = {"late": "doubt", "healthy": "good", "closed": "quiet", "idle": "quiet"}


def _said(state: State, reason: str, *more: str, mood: str = "") -> RootVerdict:
    """The verdict for `reason`, which is cut if all is too long, and `more` parts, of which empty ones are left out."""
    rest = "".join(f"; {part}" for part in more if part)
    most = max(REASON_MAX - len(rest), REASON_MAX // 3)
    short = reason if len(reason) <= most else f"{reason[: most - 1]}…"
    whole = _sentence(f"{short}{rest}")
    return msgspec.convert({"state": state, "mood": mood or _MOODS.get(state, "bad"), "reason": whole}, RootVerdict)


_INLINE = {"refused": "refused it", "lost": "could not be reached"}


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _healthy(root: RootStatus, asked: list[SaveGroup]) -> str:
    if root.newest_committed_at is None:
        return (
            "The trainers are connected; nothing was committed yet"
            if asked
            else "The trainers are connected; nothing was saved yet"
        )
    began = max((rank.since for rank in root.ranks if rank.connected), default=0.0)
    if root.newest_committed_at < began:
        return f"The trainers are connected; they have not {'committed a save' if asked else 'saved'} since they began"
    last = next((save for save in reversed(root.recent) if save.phase == "committed"), None)
    if last is not None and last.inline is not None:
        why = _INLINE[last.inline.reason]
        return f"The last save was committed; the trainers persisted it themselves, since the sidecar {why}"
    return "The last save was committed"


def _failure(failed: list[SaveGroup]) -> str:
    """`the last 3 saves did not commit: rank 2 failed: no space is left`. `failed`: newest first."""
    which = "the last save" if len(failed) == 1 else f"the last {len(failed)} saves"
    causes = next((attempt.causes for attempt in failed if not attempt.was_left_out and attempt.causes), {})
    if not causes:
        return f"{which} did not commit"
    (phase, message), saves = next(iter(causes.items()))
    return f"{which} did not commit: {rank_runs(save.rank for save in saves)} {phase}: {message}"


def _number(saves: int) -> str:
    return "a save was" if saves == 1 else f"{saves} saves were"


def _left_out(ended: list[SaveGroup]) -> str:
    """`5 saves were skipped or replaced since then`, of those that ended without a commit."""
    return f"{_number(len(ended))} skipped or replaced since then" if ended else ""


def _flying(live: list[SaveGroup]) -> str:
    """`global_step5 is in flight since 2026-11-28T09:30:11Z`. `live`: newest first."""
    if not live:
        return ""
    oldest = f"{live[-1].tag}{' is' if len(live) == 1 else ''}"
    if len(live) == 1:
        return f"{oldest} in flight since {utc(live[-1].began_at)}"
    return f"{len(live)} saves are in flight, {oldest} since {utc(live[-1].began_at)}"


def _since(root: RootStatus, asked: list[SaveGroup]) -> str:
    """Since when nothing was committed: the newest commit, or else the first of the saves `asked` for (newest first)."""
    if not asked:
        return ""
    return f"nothing was committed since {utc(root.newest_committed_at or asked[-1].began_at)}"


def _commit_is_late(root: RootStatus, asked: list[SaveGroup], now: float) -> bool:
    """Whether a commit should have come, since saves were `asked` for (newest first): one of them takes longer than commits do,
    or commits have come sooner after each other. What lies in the spool waits for its turn, and is safe there.
    """
    live = [attempt for attempt in asked if attempt.live and not attempt.is_in_spool]
    ends = [(attempt.began_at, attempt.ended_at) for attempt in attempts_of(root) if attempt.committed and attempt.ended_at]
    took = [*root.commit_s, *(past.took_s for past in root.history if past.took_s), *(end - began for began, end in ends)]
    if live and took and now > live[-1].began_at + _patience(max(took)):
        return True
    began = max((rank.since for rank in root.ranks if rank.connected), default=0.0)
    times = sorted({*(past.at for past in root.history if past.committed), *(end for _, end in ends)})
    gaps = _gaps(times, began)
    return (
        len(gaps) >= 2
        and not all(attempt.is_in_spool for attempt in asked)
        and now > max(times[-1], began) + _patience(max(gaps))
    )


def _patience(longest: float) -> float:
    return max(PATIENCE * longest, longest + PATIENCE_S)


def members_of(root: RootStatus) -> list[RankStatus]:
    """The ranks of the last run on this node, without ranks that only an earlier run had here.

    Starts tell runs apart. They begin again if a root is removed and made again, so the last one need not be the highest.
    """
    begun = [rank for rank in root.ranks if rank.start is not None]
    newest = max(begun, key=lambda rank: (rank.connected, rank.since), default=None)
    return [rank for rank in root.ranks if newest is None or rank.connected or _is_with(rank, newest)]


def _is_with(rank: RankStatus, newest: RankStatus) -> bool:
    """Whether `rank`, whose trainer has gone, was in the run of `newest`, or went after that run had begun."""
    if rank.start is not None:
        return rank.start == newest.start
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
    return Rhythm(median(gaps), last + median(gaps), last + _patience(longest))


def _gaps(times: list[float], began: float) -> list[float]:
    """The last intervals, without the one in which the trainers were restarted."""
    return [b - a for a, b in pairwise(times) if not a < began <= b and b > a][-INTERVALS:]


def about(seconds: float) -> str:
    """A rough length of time: `300 ms`, `45 s`, `10 min`, `2.5 h`."""
    for unit, length, least in (("d", 86400.0, 1.95), ("h", 3600.0, 1.95), ("min", 60.0, 1.95)):
        if seconds >= least * length:
            value = seconds / length
            return f"{value:.0f} {unit}" if value >= 9.95 or round(value, 1) == round(value) else f"{value:.1f} {unit}"
    return lasting(seconds)
