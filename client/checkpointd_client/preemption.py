"""Preemption: the signal is noted, and all ranks agree after which step to stop."""

from __future__ import annotations

import logging
import signal
import threading
import time
from types import FrameType

from checkpointd.errors import UsageError
from checkpointd_client.ranks import Board

log = logging.getLogger("checkpointd")

_KEY = "preempted-at"


class Preemption:
    """Turns a signal on any rank into the same answer on every rank at the same step.

    The first rank that sees its signal at its nth question proposes question n + 2 as the common end. Ranks that train together
    are at most one step apart, so no rank has passed that question before the proposal is there to be read.
    """

    def __init__(self, number: signal.Signals, grace_s: float, board: Board) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "preempt_signal needs Checkpointer(...) to be called on the main thread: Python allows signals only there"
            )
        self._board = board
        self._grace_s = grace_s
        self._asked = 0
        self._agreed: int | None = None
        self._at: float | None = None
        self._number = number
        self._before = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._at is None:
            self._at = time.monotonic()

    def ask(self) -> bool:
        """Whether the loop should make its last save now. Every rank asks once per step."""
        self._asked += 1
        if self._agreed is None:
            self._agreed = self._end()
        return self._agreed is not None and self._asked >= self._agreed

    def _end(self) -> int | None:
        if self._at is not None:
            alone = self._asked if self._board.is_solo else self._asked + 2
            end = int(self._board.agree(_KEY, str(alone)))
            log.warning("%s received: this job stops at its %dth step, within %g s", self._number.name, end, self._grace_s)
            return end
        heard = self._board.peek(_KEY)
        return int(heard) if heard is not None else None

    def grace_left_s(self) -> float | None:
        """Seconds left to finish what is in flight; None where no signal came to this rank."""
        return None if self._at is None else max(0.0, self._at + self._grace_s - time.monotonic())

    def close(self) -> None:
        """Put the signal's former handler back, if ours is still the one in place."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(self._number) == self._note:
            signal.signal(self._number, self._before)
