"""Meetings: calls that all ranks make together. Each rank tells the others which call it makes, and no rank waits for ever.

Invariants
  MEETING-1  Each meeting has one verdict, the first that is proposed. Rank 0 proposes the messages of all ranks when it has
      heard them all. A rank that gives up proposes that the meeting is void.
  MEETING-2  Every rank goes through the same meetings in the same order, even if it came too late for some of them.
  MEETING-3  In a meeting, each rank posts a few messages, and rank 0 reads one from each rank. Messages that no rank needs any
      more are taken back.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError, DeadlineError
from checkpointd.waits import Waiting
from checkpointd_client.ranks.board import COORDINATOR, Board, absent_error, missing_words, pauses

_LOOK_S = 0.1
_VERDICT = "verdict"


@dataclass(slots=True)
class Meetings:
    """The meetings of one rank with the others."""

    board: Board
    ranks: Ranks
    timeout_s: float
    _count: int = 0
    """The number of meetings that are over."""
    _old: list[str] = field(default_factory=list)
    """The keys of past meetings that a late rank may still go through."""

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """Meet when all ranks are `doing` the same; returns the message of each. DeadlineError names the missing ranks."""
        until, waiting = time.monotonic() + self.timeout_s, Waiting(lambda: self._missing(doing))
        return meet_until(lambda: self._next(said, doing, until, waiting), until, doing)

    def once(self, said: str, doing: str) -> tuple[dict[int, str] | None, int]:
        """Take part in the next meeting alone. Returns None and the rank that gave up if it is void. Raises as `meet` does."""
        return self._next(said, doing, time.monotonic() + self.timeout_s, Waiting(lambda: self._missing(doing)))

    def _missing(self, doing: str) -> str:
        return missing_words(self.board.absent(f"meeting/{self._count}") or [COORDINATOR], doing)

    def _next(self, said: str, doing: str, until: float, waiting: Waiting) -> tuple[dict[int, str] | None, int]:
        """The messages at the next meeting; None, and the rank that gave it up, if it is void."""
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
        """The verdict. DeadlineError if there is none at `until`."""
        if self.ranks.rank == COORDINATOR:
            heard = self._gathered(key, doing, until, waiting)
            return heard if heard.isdecimal() else self.board.agree(f"{key}/{_VERDICT}", heard)
        for pause_s in pauses():
            verdict = self.board.peek(f"{key}/{_VERDICT}")
            if verdict is not None:
                return verdict
            waiting.look()
            if time.monotonic() >= until:
                # If all have come, rank 0 is missing: it has not put the verdict.
                raise absent_error(self.board.absent(key) or [COORDINATOR], self.timeout_s, doing)
            threading.Event().wait(pause_s)
        raise AssertionError("unreachable")

    def _gathered(self, key: str, doing: str, until: float, waiting: Waiting) -> str:
        """The messages of all ranks, or the verdict of a rank that gave up before all had come."""
        while True:
            waiting.look()
            left_s = until - time.monotonic()
            try:
                return _told(self.board.read(key, None, max(0.0, min(left_s, _LOOK_S)), doing))
            except DeadlineError as error:
                verdict = self.board.peek(f"{key}/{_VERDICT}")
                if verdict is not None:
                    return verdict
                if left_s <= 0:
                    raise absent_error([*error.ranks], self.timeout_s, doing) from None

    def _give_up(self, key: str, error: BaseException) -> str:
        """Make the meeting void and raise `error`. If the meeting had taken place before that, return its verdict instead."""
        with suppress(CheckpointdError):
            verdict = self.board.agree(f"{key}/{_VERDICT}", str(self.ranks.rank))
            if _heard(verdict) is not None and isinstance(error, DeadlineError):
                return verdict
        self._old.append(key)
        raise error

    def _take_back(self, key: str, *, everybody_came: bool) -> None:
        """Forget the messages of earlier meetings when `everybody_came` to this one: no rank is still in an earlier one."""
        if everybody_came:
            for old in self._old:
                self.board.forget(old)
                if self.ranks.rank == COORDINATOR:
                    self.board.forget(f"{old}/{_VERDICT}", agreed=True)
            self._old.clear()
        self._old.append(key)


def meet_until(meet: Callable[[], tuple[dict[int, str] | None, int]], until: float, doing: str) -> dict[int, str]:
    """Call `meet` until a meeting takes place, and return its messages; DeadlineError if the last one until `until` is void."""
    while True:
        heard, gone = meet()
        if heard is not None:
            return heard
        if time.monotonic() >= until:
            raise DeadlineError(f"rank {gone} had given up waiting: every rank must be {doing}", ranks=(gone,))


def _told(heard: dict[int, str]) -> str:
    """Each message once, with the ranks that sent it: nearly always, all ranks send the same."""
    by_text: dict[str, list[int]] = {}
    for rank, text in heard.items():
        by_text.setdefault(text, []).append(rank)
    return json.dumps(list(by_text.items()))


def _heard(verdict: str) -> dict[int, str] | None:
    """The message of each rank; None if the verdict is the number of a rank that gave up."""
    if verdict.isdecimal():
        return None
    return dict(sorted((rank, text) for text, ranks in json.loads(verdict) for rank in ranks))
