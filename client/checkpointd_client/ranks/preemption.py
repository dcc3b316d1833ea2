"""Preemption: signals, their grace periods, and the question `preempted(step)`, to which all ranks get the same answer.

A point is one question: the step, and how many questions this rank has asked about the step. Ranks that ask equally often about
each step go through the same points, in training, evaluation or warm-up.

Invariants
  PREEMPT-1  The end is one point for all ranks. Every rank answers no at points up to the end (but see PREEMPT-3), and yes at
      all later points.
  PREEMPT-2  The end is the furthest point that any rank has shown. That rank answers yes at its very next question.
  PREEMPT-3  When half of a grace period is over, a rank that is still at the end's step answers yes to any question. It saves
      the same step as the others, and it may never ask as many questions about that step as they did.

How PREEMPT-1 is kept: a rank that knows of no signal shows the point at which it asks, looks again for a signal, and only then
answers no. A rank that knows of a signal tells all ranks of it before it reads the points of all. Then it proposes the furthest
one as the end. The first proposal counts.
"""

from __future__ import annotations

import logging
import secrets
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Self, TypeAlias

from checkpointd.arguments import shown
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd_client.ranks.board import Board, poll
from checkpointd_client.ranks.signals import Arrivals

log = logging.getLogger("checkpointd")

PreemptSignals: TypeAlias = "int | Iterable[int] | Mapping[int, float] | Mapping[signal.Signals, float] | None"

_ANY, _ASKED, _FIXER, _END = "preempted/any", "preempted/asked", "preempted/fixer", "preempted/end"
FIXER_S = 2.0
"""How long the ranks wait for one of them to propose the end, so that a thousand ranks do not all read the points of all."""
LATE_PART = 0.5
"""The part of a grace period after which PREEMPT-3 holds."""


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """Question number `count` about `step`, after `loads` calls of load()."""

    loads: int
    step: int
    count: int

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))

    @staticmethod
    def of(text: str) -> Point:
        return Point(*map(int, text.split(".")))


_BEFORE_ALL = Point(-1, 0, 0)


def graces_of(signals: PreemptSignals, grace_s: float) -> dict[signal.Signals, float]:
    """The grace period of each signal: its own, or `grace_s`. Raises UsageError for a bad signal or period."""
    if signals is None:
        return {}
    given = (signals,) if isinstance(signals, int) else signals
    if not _is_several(given):
        raise UsageError(f"preempt_signals is {shown(signals)}; it must be a signal, several, or signals with seconds")
    graces = list(given.items()) if isinstance(given, Mapping) else [(number, grace_s) for number in given]
    for number, seconds in graces:
        if not _can_be_caught(number):
            raise UsageError(
                f"preempt_signals is {shown(signals)}; it must name signals that a process can catch, such as signal.SIGTERM"
            )
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= sys.float_info.max:
            raise UsageError(
                f"preempt_signals is {shown(signals)}; each signal takes seconds, more than 0, not {shown(seconds)}"
            )
    return {signal.Signals(number): float(seconds) for number, seconds in graces}


def _is_several(given: object) -> bool:
    try:
        iter(given)  # type: ignore[call-overload]  # a tensor of one number looks like an Iterable, but raises here
    except TypeError:
        return False
    return not isinstance(given, str | bytes)


def _can_be_caught(number: object) -> bool:
    is_number = isinstance(number, int) and not isinstance(number, bool)
    return is_number and number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}


class Preemption:
    """One rank's part in a preemption. `graces`: each signal and its grace period in seconds. If several signals come, the
    period that ends first counts.
    """

    def __init__(self, graces: Mapping[signal.Signals, float], board: Board) -> None:
        self._graces, self._board = dict(graces), board
        self._came: dict[signal.Signals, float] = {}
        """When this rank got each signal, or heard of it. Signal handlers write it, so it has no lock."""
        self._told: set[signal.Signals] = set()
        """The signals that are on the board."""
        self._loads = 0
        self._last = _BEFORE_ALL
        self._end: Point | None = None
        self._token = secrets.token_hex(8)
        self._arrivals: Arrivals | None = None

    def listen(self) -> Self:
        """Note the signals of this process until `close`. Raises UsageError outside the main thread."""
        self._arrivals = Arrivals(self._graces.keys(), self._note, self._tell_at_once)
        return self

    # --- signals -----------------------------------------------------------------------------------------------

    def _note(self, number: signal.Signals, at: float) -> None:
        self._came.setdefault(number, at)

    def _tell_at_once(self, number: signal.Signals) -> None:
        """Tell the other ranks at once: this rank may not ask for a long time. Runs on the thread of `Arrivals`."""
        if number in self._told:
            return
        log.warning("%s received: this job is to stop within %g s", number.name, self._graces[number])
        try:
            self._tell(number)
        except CheckpointdError as error:
            log.error("the other ranks cannot be told of %s: %s", number.name, error)

    def _tell(self, number: signal.Signals) -> None:
        self._board.agree(_key(number), "came")
        self._board.agree(_ANY, "came")
        self._told.add(number)

    def _hears(self) -> bool:
        """Whether a signal has come to any rank. When this returns, every signal that this rank knows is on the board."""
        for number in set(self._came) - self._told:
            self._tell(number)
        if not self._told and self._board.peek(_ANY) is None:
            return False
        for number in self._graces.keys() - self._told:
            if self._board.peek(_key(number)) is not None:
                self._note(number, time.monotonic())
                self._told.add(number)
        return bool(self._told)

    def grace_left_s(self) -> float | None:
        """Seconds left to finish the saves in flight; None if this rank knows of no signal."""
        now, came = time.monotonic(), list(self._came.items())  # a copy, since a handler may change the dict at any line
        return min((max(0.0, at + self._graces[number] - now) for number, at in came), default=None)

    @property
    def _is_late(self) -> bool:
        now, came = time.monotonic(), list(self._came.items())
        return any(now >= at + LATE_PART * self._graces[number] for number, at in came)

    # --- questions ---------------------------------------------------------------------------------------------

    @property
    def begun(self) -> bool:
        """Whether a signal has come to any rank. This does not count as a question: each rank may ask as often as it likes."""
        try:
            return self._hears()
        except CheckpointdError as error:
            log.error("the other ranks cannot be asked whether a signal has come: %s", error)
            return bool(self._came)

    def ask(self, step: int) -> bool:
        """Whether this rank should save `step` and leave."""
        last = self._last
        self._last = Point(self._loads, step, last.count + 1 if (last.loads, last.step) == (self._loads, step) else 1)
        try:
            return self._answer(self._last)
        except CheckpointdError as error:
            log.error("the ranks cannot agree on the step to stop at: %s", error)
            return bool(self._came)  # decide alone: a last save that may be aborted is better than none

    def loaded(self) -> None:
        """Note that all ranks have loaded: steps may go on from a lower number."""
        self._loads += 1

    def _answer(self, point: Point) -> bool:
        if not self._hears():
            self._board.post(_ASKED, str(point))
            if not self._hears():
                return False
        if self._end is None:
            self._end = self._agreed()
        end = self._end
        return point > end or ((point.loads, point.step) == (end.loads, end.step) and self._is_late)

    def _agreed(self) -> Point:
        if self._board.agree(_FIXER, self._token) != self._token:
            poll(lambda: self._board.peek(_END) is not None, FIXER_S, lambda: "no rank has proposed the step to stop at")
        furthest = max(map(Point.of, self._board.posted(_ASKED).values()), default=_BEFORE_ALL)
        end = Point.of(self._board.agree(_END, str(furthest)))
        log.warning("a preemption signal came: preempted() returns True on every rank from about step %d on", max(0, end.step))
        return end

    def close(self) -> None:
        """Put the former handlers back."""
        if self._arrivals is not None:
            self._arrivals.close()


def _key(number: signal.Signals) -> str:
    return f"preempted/{number.name}"
