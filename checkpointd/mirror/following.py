"""Keeps a mirror in step without end: looks for new commits, copies them, and tries again after failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from checkpointd.commit.branches import commits_of
from checkpointd.errors import CheckpointdError, FencedError, RootInUseError, StoreError, UsageError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ErrorReport
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring
from checkpointd.mirror.news import CheckpointNews, MirrorProgress, News
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowPace:
    """How often a mirror looks; seconds."""

    poll_s: float = 5.0
    """Between two looks for a new entry of the origin's log."""
    look_s: float = 60.0
    """Between two looks at both roots without news. Checkpoints that could not be read are tried again then."""
    again_s: float = 3600.0
    """Between two tries to heal what could not be healed."""
    pause_max_s: float = 60.0
    """The longest pause after failures."""


class Follower:
    """Follows one origin. `progress` says how far it has come; any thread may read it.

    `is_patient`: a mirror that another process holds when this one begins is waited for. `fails` is called with each new error
    after which it tries again.
    """

    def __init__(
        self,
        origin: Store,
        mirror: Store,
        config: MirrorConfig | None = None,
        pace: FollowPace | None = None,
        *,
        is_patient: bool = False,
        tell: Callable[[News], None] = lambda _: None,
        fails: Callable[[CheckpointdError], None] = lambda _: None,
    ) -> None:
        self.pace = pace or FollowPace()
        self.progress = MirrorProgress(origin=origin.url, mirror=mirror.url)
        self._is_patient = is_patient
        self._tell_on, self._fails = tell, fails
        self._mirroring = Mirroring(origin, mirror, config, tell=self._tell, on_bytes=self._count, on_copy=self._copying)
        self._begun = False
        self._looked_at = float("-inf")
        self._again_at = float("-inf")

    async def run(self) -> None:
        """Follow until cancelled. Raises FencedError or UsageError if the mirror cannot go on."""
        failed = 0
        try:
            while True:
                try:
                    await self._round(again=failed > 0)
                    failed, pause_s = 0, self.pace.poll_s
                except (FencedError, UsageError) as error:
                    self._problem("over", error)
                    raise
                except CheckpointdError as error:
                    if not (isinstance(error, StoreError) or (isinstance(error, RootInUseError) and self._is_patient)):
                        self._problem("over", error)
                        raise
                    failed += 1
                    pause_s = min(self.pace.pause_max_s, self.pace.poll_s * 2 ** min(failed, 16))
                    self._problem("failing", error)
                await asyncio.sleep(pause_s)
        finally:
            await self._mirroring.end()

    async def _round(self, *, again: bool) -> None:
        now = asyncio.get_running_loop().time()
        if not self._begun:
            self._begun = await self._mirroring.begin()
            if not self._begun:  # perhaps the path of the origin is wrong
                self.progress.state, self.progress.problem = "beginning", None
                return
            self._again_at = now
        if now - self._looked_at >= self.pace.look_s or again:
            everything = now - self._again_at >= self.pace.again_s
            self._mirroring.try_again(everything=everything)
            self._again_at = now if everything else self._again_at
        elif not await self._mirroring.has_news():
            return
        await self._mirroring.step()
        self._looked_at = now
        self._in_step()

    def _in_step(self) -> None:
        seen = self._mirroring.seen
        newest = next(iter(commits_of(seen.ours.attempts.values())), None)
        shown = self.progress
        shown.newest_tag = newest.tag if newest is not None else None
        shown.newest_step = newest.commit.step if newest is not None else None
        shown.problem, shown.behind = None, len(seen.agenda.due) + len(self._mirroring.left)
        shown.tag, shown.done_bytes, shown.total_bytes = "", 0, 0
        shown.state = "copying" if seen.agenda.due else "in step"  # those that are due came meanwhile
        if not seen.agenda.due and {"unreadable", "blocked"}.isdisjoint(self._mirroring.left.values()):
            shown.in_step_at = time.time()

    # --- what the mirroring tells ------------------------------------------------------------------------------------

    def _copying(self, checkpoint: LoggedAttempt, nbytes: int, behind: int) -> None:
        shown = self.progress
        shown.state, shown.tag, shown.behind = "copying", checkpoint.tag, behind + 1
        shown.done_bytes, shown.total_bytes = 0, nbytes

    def _count(self, nbytes: int) -> None:
        self.progress.done_bytes += nbytes

    def _tell(self, news: News) -> None:
        if isinstance(news, CheckpointNews):
            self.progress.copied_bytes += news.copied_bytes
            if news.kind == "mirrored":
                self.progress.mirrored += 1
            elif news.kind != "healed":
                self.progress.left = {**self.progress.left, news.kind: self.progress.left.get(news.kind, 0) + 1}
        self._tell_on(news)

    def _problem(self, state: Literal["failing", "over"], error: CheckpointdError) -> None:
        before = self.progress.problem
        if before is None or before.message != str(error):
            log.error("%s cannot be mirrored to %s: %s", self.progress.origin, self.progress.mirror, error)
            if state == "failing":
                self._fails(error)
        self.progress.state, self.progress.problem = state, ErrorReport.of(error)
