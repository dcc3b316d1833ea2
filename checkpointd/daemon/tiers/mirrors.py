"""The mirrors that a daemon keeps: each follows its origin in a task of its own.

Invariant
  MIRRORTASK-1  A mirror that fails, hangs or ends disturbs nothing else in the daemon. Its stores are its own, so no save waits
      for its storage, and the daemon waits for it at most CLOSE_S when it leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from checkpointd.config import ServedMirror
from checkpointd.daemon.process.logs import Subject, about
from checkpointd.errors import CheckpointdError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.mirror.following import Follower, FollowPace
from checkpointd.mirror.mirroring import MirrorConfig
from checkpointd.mirror.news import WORDS, MirrorProgress, News, RemovalNews
from checkpointd.pipeline.workers import stopped
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore

log = logging.getLogger("checkpointd")

CLOSE_S = 10.0


class Mirrors:
    """All mirrors of one daemon."""

    def __init__(self, settings: Sequence[ServedMirror]) -> None:
        self._settings = settings
        self._progress = {one.mirror: MirrorProgress(origin=one.origin, mirror=one.mirror) for one in settings}

    @property
    def progress(self) -> tuple[MirrorProgress, ...]:
        """How far each has come, in the order of the configuration."""
        return tuple(self._progress.values())

    async def run(self) -> None:
        """Keep all of them until cancelled."""
        tasks = [asyncio.create_task(self._keep(one)) for one in self._settings]
        try:
            await asyncio.wait(tasks)  # unlike gather(), it ends at once when it is cancelled
        finally:
            if not await stopped(tasks, CLOSE_S):
                log.warning("a mirror has not answered for %g s, and is not waited for", CLOSE_S)

    async def _keep(self, setting: ServedMirror) -> None:
        about(Subject(setting.origin))
        try:
            origin, mirror = _opened(setting.origin, read_only=True), _opened(setting.mirror, read_only=False)
        except CheckpointdError as error:
            self._ended(setting, error)
            return
        config = MirrorConfig(
            rules=setting.rules, everything=setting.everything, verify=setting.verify, limit_bps=setting.limit_bps
        )
        follower = Follower(origin, mirror, config, FollowPace(poll_s=setting.poll_s), is_patient=True, tell=_log)
        self._progress[setting.mirror] = follower.progress
        try:
            await follower.run()
        except CheckpointdError:
            return  # `progress` and the log have it; the others go on
        except Exception as error:
            log.exception("mirroring %s failed in an unforeseen way; please report it", setting.origin)
            self._ended(setting, CheckpointdError(f"mirroring failed: {error!r}"))
        finally:
            await origin.close()
            await mirror.close()

    def _ended(self, setting: ServedMirror, error: CheckpointdError) -> None:
        shown = self._progress[setting.mirror]
        shown.state, shown.problem = "over", ErrorReport.of(error)
        log.error("%s cannot be mirrored to %s: %s", setting.origin, setting.mirror, error)


def _opened(place: str, *, read_only: bool) -> Store:
    """The store at `place`. No symbolic link in its path is followed, as at the roots that the daemon serves."""
    return open_store(place, read_only=read_only) if "://" in place else PosixStore(place, read_only=read_only, anchor="/")


def _log(news: News) -> None:
    if isinstance(news, RemovalNews):
        log.info("the rules of the mirror removed %s there", ", ".join(news.retired))
    elif news.kind in ("mirrored", "healed"):
        words = "%s %s: %d bytes copied, %d were there"
        log.info(words, news.tag, WORDS[news.kind], news.copied_bytes, news.found_bytes)
    else:
        level = logging.INFO if news.kind in ("left-out", "removed") else logging.ERROR
        log.log(level, "%s %s: %s", news.tag, WORDS[news.kind], news.why)
