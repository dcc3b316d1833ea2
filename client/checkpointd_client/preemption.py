"""Preemption: the signal is noted, and all ranks agree after which step to stop."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from types import FrameType

from checkpointd.errors import CheckpointdError, UsageError
from checkpointd_client.ranks import Board

log = logging.getLogger("checkpointd")

_KEY, _COUNT = "preempted-at", "asked"
LEAD = 2
"""Questions between the proposal and the end: one may be under way on another rank, and has not seen the proposal."""


class Preemption:
    """Turns a signal on any rank into the same answer on every rank at the same step.

    Every rank posts the number of each question that it asks. The first rank that sees its signal proposes as the common end a
    question LEAD after the furthest that any rank has come: hosts that run ahead of their devices may be several steps apart.
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
        self._process = os.getpid()
        self._before = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            # A forked child, such as a data loader's worker: the signal means to it what it meant before.
            signal.signal(number, self._before if self._before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        del frame
        if self._at is None:
            self._at = time.monotonic()

    def ask(self) -> bool:
        """Whether the loop should make its last save now. Every rank asks once per step."""
        self._asked += 1
        if self._agreed is None:
            try:
                self._agreed = self._end()
            except CheckpointdError as error:
                log.error("the ranks cannot agree on the step to stop at: %s", error)
                return self._at is not None  # alone, then: better a last save that may be aborted than none
        return self._agreed is not None and self._asked >= self._agreed

    def _end(self) -> int | None:
        self._board.post_count(_COUNT, self._asked)
        heard = self._board.peek(_KEY)
        if heard is not None:
            return int(heard)
        if self._at is None:
            return None
        lead = 0 if self._board.is_solo else LEAD
        end = int(self._board.agree(_KEY, str(max(self._board.counts(_COUNT)) + lead)))
        log.warning("%s received: this job stops at its %dth step, within %g s", self._number.name, end, self._grace_s)
        return end

    def grace_left_s(self) -> float | None:
        """Seconds left to finish what is in flight; None where no signal came to this rank."""
        return None if self._at is None else max(0.0, self._at + self._grace_s - time.monotonic())

    def close(self) -> None:
        """Put the signal's former handler back, if ours is still the one in place."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(self._number) == self._note:
            signal.signal(self._number, self._before)
