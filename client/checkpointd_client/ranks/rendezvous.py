"""Calls that all ranks make together: each rank tells its call, and none waits for ever.

Invariants
  MEETING-1  Of each meeting there is one verdict, which the first to propose one makes: what all ranks said, which rank 0
      proposes once it has heard them, or that it is void, which whoever gives up proposes.
  MEETING-2  Every rank goes through the same meetings in the same order, also one that came too late for some of them.
  MEETING-3  A meeting costs each rank a few messages, and rank 0 one from each; what nobody needs any more is taken back.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field

from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DeadlineError
from checkpointd.waits import Waiting
from checkpointd_client.ranks.board import COORDINATOR, Board, absent_error

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.002, 0.1
_VERDICT = "verdict"


@dataclass(slots=True)
class Meetings:
    """One rank's."""

    board: Board
    ranks: Ranks
    timeout_s: float
    _count: int = 0
    """How many of them are over."""
    _old: list[str] = field(default_factory=list)
    """The keys of those that somebody may still come to."""

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """What every rank said, by rank, once all of them are `doing` the same. DeadlineError names those that did not come."""
        until, gone = time.monotonic() + self.timeout_s, None
        waiting = Waiting(lambda: self._missing(doing))
        while gone is None or time.monotonic() < until:
            heard, gone = self._next(said, doing, until, waiting)
            if heard is not None:
                return heard
        raise gone_error(gone, doing)

    def once(self, said: str, doing: str) -> tuple[dict[int, str] | None, int]:
        """What was said at the next meeting alone; None, and who gave it up, where it is void. Raises as `meet` does."""
        return self._next(said, doing, time.monotonic() + self.timeout_s, Waiting(lambda: self._missing(doing)))

    def _missing(self, doing: str) -> str:
        absent = self.board.absent(f"meeting/{self._count}")
        return f"ranks {absent or [COORDINATOR]} have not come: every rank must be {doing}"

    def _next(self, said: str, doing: str, until: float, waiting: Waiting) -> tuple[dict[int, str] | None, int]:
        """What was said at the next meeting; None, and who gave it up, where it is void."""
        key = f"meeting/{self._count + 1}"
        self._count += 1
        self.board.post(key, said)
        try:
            verdict = self._wait(key, doing, until, waiting)
        except BaseException as error:
            verdict = self._give_up(key, error)
        heard = _heard(verdict)
        self._take_back(key, everybody_came=heard is not None)
        return heard, int(verdict) if heard is None else COORDINATOR

    def _wait(self, key: str, doing: str, until: float, waiting: Waiting) -> str:
        """The verdict. DeadlineError where there is none by then."""
        if self.ranks.rank == COORDINATOR:
            heard = self._gathered(key, doing, until, waiting)
            return heard if heard.isdecimal() else self.board.agree(f"{key}/{_VERDICT}", heard)
        pause, never = _PAUSE_MIN_S, threading.Event()
        while (verdict := self.board.peek(f"{key}/{_VERDICT}")) is None:
            waiting.look()
            if time.monotonic() >= until:
                # Where all have come, rank 0 has not gathered what they said.
                raise absent_error(self.board.absent(key) or [COORDINATOR], self.timeout_s, doing)
            never.wait(pause)
            pause = min(pause * 1.5, _PAUSE_MAX_S)
        return verdict

    def _gathered(self, key: str, doing: str, until: float, waiting: Waiting) -> str:
        """What all ranks said, or the verdict of somebody who gave up before all had come."""
        while True:
            waiting.look()
            left_s = until - time.monotonic()
            try:
                return _told(self.board.read(key, None, max(0.0, min(left_s, _PAUSE_MAX_S)), doing))
            except DeadlineError as error:
                verdict = self.board.peek(f"{key}/{_VERDICT}")
                if verdict is not None:
                    return verdict
                if left_s <= 0:
                    raise absent_error([*error.ranks], self.timeout_s, doing) from None

    def _give_up(self, key: str, error: BaseException) -> str:
        """Make the meeting void, and raise `error`; the verdict where all have come all the same."""
        with suppress(CheckpointdError):
            verdict = self.board.agree(f"{key}/{_VERDICT}", str(self.ranks.rank))
            if _heard(verdict) is not None and isinstance(error, DeadlineError):
                return verdict
        self._old.append(key)
        raise error

    def _take_back(self, key: str, *, everybody_came: bool) -> None:
        """Who came to a meeting is through with all before it."""
        if everybody_came:
            for old in self._old:
                self.board.forget(old)
                if self.ranks.rank == COORDINATOR:
                    self.board.forget(f"{old}/{_VERDICT}", agreed=True)
            self._old.clear()
        self._old.append(key)


def gone_error(rank: int, doing: str) -> DeadlineError:
    """The error for ranks that came after `rank` had given up waiting for them."""
    return DeadlineError(f"rank {rank} had given up waiting: every rank must be {doing}", ranks=(rank,))


def _told(heard: dict[int, str]) -> str:
    """Each thing that was said once, with the ranks that said it: nearly always there is one."""
    by_text: dict[str, list[int]] = {}
    for rank, text in heard.items():
        by_text.setdefault(text, []).append(rank)
    return json.dumps(list(by_text.items()))


def _heard(verdict: str) -> dict[int, str] | None:
    """What was said, by rank; None where the verdict is the number of the rank that gave up."""
    if verdict.isdecimal():
        return None
    return dict(sorted((rank, text) for text, ranks in json.loads(verdict) for rank in ranks))
