"""Reports long waits: after 10 seconds, and each time the wait doubles, the log says which rank, process or object is missing.

Every wait for another rank, another process or the storage goes through `Waiting`. It sets no bound: the caller has a deadline.
`to_the_end` waits for work that cannot be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypeVar

from checkpointd.errors import CheckpointdError

log = logging.getLogger("checkpointd.waits")
"""Of its own, since commands show it and nothing else of the log."""
T = TypeVar("T")

ABSENCE_S = 3.0
"""How long an object must be missing unless a caller says otherwise: see PATIENT-2."""
FIRST_REPORT_S = 10.0


class Waiting:
    """One wait, which begins now. `missing` names the missing thing in words; it is called only when a report is due.

    `clock` gives seconds; `level` is the log level of the reports.
    """

    def __init__(
        self, missing: Callable[[], str], *, clock: Callable[[], float] = time.monotonic, level: int = logging.WARNING
    ) -> None:
        self._missing, self._clock, self._level = missing, clock, level
        self._began = clock()
        self._report_at = self._began + FIRST_REPORT_S

    def look(self) -> None:
        """Report the missing thing if a report is due. A caller that polls calls this at every look."""
        now = self._clock()
        if now < self._report_at:
            return
        while self._report_at <= now:
            self._report_at += self._report_at - self._began
        lasted_s = now - self._began
        try:
            missing = self._missing()
        except CheckpointdError as error:  # a report that fails must not end the wait
            missing = str(error)
        log.log(self._level, "still waiting after %.0f s: %s", lasted_s, missing)

    def until(self, wait: Callable[[float], bool], timeout_s: float | None = None) -> bool:
        """Block until `wait`, called again and again with the seconds that it may take, returns True.

        Returns False after `timeout_s` seconds; None waits for ever.
        """
        over_at = self._over_at(timeout_s)
        while True:
            if wait(self._left_s(over_at)):
                return True
            if self._clock() >= over_at:
                return False
            self.look()

    async def until_done(self, task: asyncio.Future[Any], timeout_s: float) -> bool:
        """As `until`, for a task of the running loop, which is never cancelled. `clock` must be the loop's clock."""
        over_at = self._over_at(timeout_s)
        while True:
            done, _ = await asyncio.wait({task}, timeout=self._left_s(over_at))
            if done:
                return True
            if self._clock() >= over_at:
                return False
            self.look()

    def _over_at(self, timeout_s: float | None) -> float:
        """The end of the wait as a time of the clock, so that rounding cannot leave a rest when the clock reaches it."""
        return math.inf if timeout_s is None else self._began + timeout_s

    def _left_s(self, over_at: float) -> float:
        return max(0.0, min(self._report_at, over_at) - self._clock())


def is_done(future: Future[Any], seconds: float) -> bool:
    """Wait at most `seconds` until `future` is done; for `Waiting.until`."""
    return bool(wait_for_futures({future}, seconds).done)


# --- work that cannot be stopped ---------------------------------------------------------------------------------------


async def to_the_end(work: Awaitable[T], job: Future[T] | None = None) -> T:
    """Await `work`. A cancellation takes effect only when `work` has ended, or when its `job` had not begun and was dropped.

    A system call cannot be stopped. A caller that went on earlier would reuse memory and descriptors that are still in use.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if job is None or not job.cancel():
            await _ended(task)
        raise


async def _ended(task: asyncio.Future[T]) -> None:
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # The cancellation is what the caller learns of.
