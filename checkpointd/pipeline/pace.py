"""The pace of one save: how long its copy and its writer rest after each piece of work, so that training keeps its speed.

Invariants
  PACE-1  A save rests only while its bytes, at the speed so far, are written before its limit. So pacing never makes a save
      end late: the next save, the deadline and everybody who waits for the save come first.
  PACE-2  A rest takes at most REST_S_MAX, so a save that somebody begins to wait for goes on at full speed at once.
  PACE-3  The background copy rests only while it ends, at the speed so far, before `copy_until`. Without that limit it never
      rests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

PaceReason = Literal["", "late", "awaited"]

REST_S_MAX = 0.25
LEFT_S_MAX = 1e6
RESERVE = 1.5
"""A save counts as late if the rest of its bytes would take more than its remaining time divided by this."""


def rest_s(busy_s: float, share: float, *, needed_s: float | None, left_s: float) -> float:
    """The seconds to rest after a piece of work that took `busy_s`, so that work takes the `share` of the time.

    `needed_s`: how long the rest of the save takes at the speed so far, rests included; None if that is unknown. `left_s`: the
    seconds until the save must have ended.
    """
    if share >= 1.0 or (needed_s is not None and needed_s * RESERVE > left_s) or left_s <= 0:
        return 0.0
    return min(busy_s * (1.0 / share - 1.0), REST_S_MAX)


@dataclass(slots=True)
class Pace:
    """The pace of one save. Any thread may set `share` and call `lift`; only the stager and the writer rest."""

    share: float = 1.0
    """The part of the time in which the save works: 1 is full speed."""
    until: float | None = None
    """When the save should have ended, by time.monotonic(); None if nothing is due."""
    copy_until: float | None = None
    """When the background copy should have ended, by time.monotonic(); None if it must not rest."""
    rested_s: float = 0.0
    """How long the workers have rested, added up."""
    copy_rested_s: float = 0.0
    """How long the background copy has rested."""
    reason: PaceReason = ""
    """Why the save goes at full speed although `share` is lower: it would be "late", or it is "awaited"."""
    on_change: Callable[[], None] | None = field(default=None, repr=False)
    """Called when `share` was set or the pace was lifted."""
    _is_lifted: bool = False

    def lift(self, reason: PaceReason) -> None:
        """Rest no more, for this reason."""
        if not self._is_lifted:
            self.reason, self._is_lifted = reason, True
            self._tell()

    def set(self, share: float) -> None:
        """Work for `share` of the time from now on."""
        if share != self.share:
            self.share = share
            self._tell()

    def follow(self, share: float, left_s: float) -> None:
        """Do as another process says: `share`, as long as the save then ends within `left_s`."""
        self.share, self.until = share, time.monotonic() + left_s

    @property
    def asked(self) -> tuple[float, float]:
        """What to tell another process: the share, and the seconds in which the save should have ended."""
        left_s = LEFT_S_MAX if self.until is None else min(LEFT_S_MAX, max(0.0, self.until - time.monotonic()))
        return (1.0 if self._is_lifted else self.share), left_s

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def rest_after(self, busy_s: float, needed_s: float | None) -> float:
        """The seconds to rest now (`rest_s`)."""
        if self.share >= 1.0 or self._is_lifted:
            return 0.0
        left_s = float("inf") if self.until is None else self.until - time.monotonic()
        seconds = rest_s(busy_s, self.share, needed_s=needed_s, left_s=left_s)
        self.reason = "" if seconds or not busy_s else "late"
        return seconds

    def copy_rest_after(self, busy_s: float, needed_s: float) -> float:
        """The seconds for which the background copy rests now; the rest of it takes `needed_s` at the speed so far (PACE-3)."""
        if self._is_lifted or self.copy_until is None:
            return 0.0
        return rest_s(busy_s, self.share, needed_s=needed_s, left_s=self.copy_until - time.monotonic())

    def hurry_copy(self) -> None:
        """Let the background copy rest no more: somebody waits for the snapshot."""
        self.copy_until = None
