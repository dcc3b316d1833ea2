"""Waiting, out loud: a wait of more than 10 seconds says in the log who or what is missing, and again whenever it has doubled.

Every wait for another rank, another process or the storage goes through `Waiting`. It bounds nothing: whoever waits has a
deadline.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

from checkpointd.errors import CheckpointdError

log = logging.getLogger("checkpointd")

FIRST_WORD_S = 10.0


class Waiting:
    """One wait, which begins now. `missing` says what is waited for, in words; it is asked only when a word is due.

    `clock` gives seconds; `level` is that of the log.
    """

    def __init__(
        self, missing: Callable[[], str], *, clock: Callable[[], float] = time.monotonic, level: int = logging.WARNING
    ) -> None:
        self._missing, self._clock, self._level = missing, clock, level
        self._began = clock()
        self._word_at = self._began + FIRST_WORD_S

    def look(self) -> None:
        """Say what is missing where a word is due. Whoever polls calls this at every look."""
        now = self._clock()
        if now < self._word_at:
            return
        while self._word_at <= now:
            self._word_at += self._word_at - self._began
        lasted_s = now - self._began
        try:
            missing = self._missing()
        except CheckpointdError as error:  # a word that cannot be had must not end the wait
            missing = str(error)
        log.log(self._level, "still waiting after %.0f s: %s", lasted_s, missing)

    def until(self, wait: Callable[[float], bool], timeout_s: float | None = None) -> bool:
        """Call `wait` with the seconds that it may take, again and again, until it returns True.

        False where `timeout_s` seconds are over before that; None: wait for ever. Blocks.
        """
        over_at = self._over_at(timeout_s)
        while True:
            if wait(self._left_s(over_at)):
                return True
            if self._clock() >= over_at:
                return False
            self.look()

    async def until_done(self, task: asyncio.Future[Any], timeout_s: float) -> bool:
        """The same for a task of the running loop, whose clock this wait must go by. The task is never cancelled."""
        over_at = self._over_at(timeout_s)
        while True:
            done, _ = await asyncio.wait({task}, timeout=self._left_s(over_at))
            if done:
                return True
            if self._clock() >= over_at:
                return False
            self.look()

    def _over_at(self, timeout_s: float | None) -> float:
        """A moment of the clock: what is left until then comes to nothing when the clock is there, whatever was rounded."""
        return math.inf if timeout_s is None else self._began + timeout_s

    def _left_s(self, over_at: float) -> float:
        return max(0.0, min(self._word_at, over_at) - self._clock())


def is_done(future: Future[Any], seconds: float) -> bool:
    """Wait until `future` is done, at most `seconds`: what `Waiting.until` waits with."""
    return bool(wait_for_futures({future}, seconds).done)
