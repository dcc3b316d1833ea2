"""Calls that all ranks make together: each says what it calls, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from checkpointd.config import Ranks
from checkpointd.errors import DeadlineError
from checkpointd_client.ranks import Board

_WITHDRAWN = ""
_PAUSE_S = 0.05


@dataclass(slots=True)
class Meetings:
    """Counts the calls that all ranks made together. One that not every rank joined does not count, and is withdrawn."""

    board: Board
    ranks: Ranks
    timeout_s: float
    _done: int = 0

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """What every rank said (never nothing), by rank. DeadlineError names those that did not come."""
        key, until = f"meeting/{self._done + 1}", time.monotonic() + self.timeout_s
        self.board.post(key, said)
        try:
            while True:
                heard = self.board.read(key, None, max(0.0, until - time.monotonic()), doing)
                gone = [rank for rank, text in sorted(heard.items()) if text == _WITHDRAWN]
                if not gone:
                    self._done += 1
                    return heard
                if time.monotonic() >= until:
                    raise DeadlineError(f"ranks {gone} had given up waiting: every rank must be {doing}", ranks=tuple(gone))
                threading.Event().wait(_PAUSE_S)
        except BaseException:
            self.board.post(key, _WITHDRAWN)
            raise
