"""The exports of a daemon: each rule is followed in a task of its own.

Invariants
  EXPORTTASK-1  A rule that fails, hangs or ends disturbs nothing else in the daemon. Its stores are its own, so no save waits
      for its storage, and the daemon waits for it at most CLOSE_S when it leaves.
  EXPORTTASK-2  One export runs at a time, so their memory does not add up. While the daemon has a save to write, it rests up to
      REST_S before each batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from checkpointd.bucket_urls import is_bucket_url
from checkpointd.config import ServedExport
from checkpointd.daemon.process.logs import Subject, about
from checkpointd.errors import CheckpointdError
from checkpointd.export.following import Exporter, ExportPace
from checkpointd.export.progress import ExportProgress
from checkpointd.export.target import target_at
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.workers import stopped
from checkpointd.store import open_store
from checkpointd.store.posix.store import PosixStore

log = logging.getLogger("checkpointd")

CLOSE_S = 10.0
REST_S = 1.0
_LOOK_S = 0.05


class Exports:
    """All exports of one daemon. `is_saving` tells whether it has a save to write."""

    def __init__(self, settings: Sequence[ServedExport], is_saving: Callable[[], bool]) -> None:
        self._settings, self._is_saving = settings, is_saving
        self._progress = {one.to: ExportProgress(root=one.root, to=one.to) for one in settings}
        self._slot = asyncio.Semaphore()

    @property
    def progress(self) -> tuple[ExportProgress, ...]:
        """How far each has come, in the order of the configuration."""
        return tuple(self._progress.values())

    async def run(self) -> None:
        """Follow all of them until cancelled."""
        tasks = [asyncio.create_task(self._follow(one)) for one in self._settings]
        try:
            await asyncio.wait(tasks)  # unlike gather(), it ends at once when it is cancelled
        finally:
            if not await stopped(tasks, CLOSE_S):
                log.warning("an export has not ended for %g s, and is not waited for", CLOSE_S)

    async def _follow(self, setting: ServedExport) -> None:
        about(Subject(setting.root))
        try:
            url = is_bucket_url(setting.root)
            # No symbolic link in its path is followed, as at the roots that the daemon serves.
            root = open_store(setting.root, read_only=True) if url else PosixStore(setting.root, read_only=True, anchor="/")
            target = target_at(setting.to)
            pace = ExportPace(poll_s=setting.poll_s)
            exporter = Exporter(root, target, setting, pace, turn=self._rest, slot=self._slot)
        except CheckpointdError as error:
            self._ended(setting, error)
            return
        self._progress[setting.to] = exporter.progress
        try:
            await exporter.run()
        except CheckpointdError:
            return  # `progress` and the log have it; the others go on
        except Exception as error:
            log.exception("exporting %s failed in an unforeseen way; please report it", setting.root)
            self._ended(setting, CheckpointdError(f"exporting failed: {error!r}"))
        finally:
            await root.close()
            await target.store.close()

    async def _rest(self, nbytes: int) -> None:
        """Before a batch of `nbytes`: let a save that is to be written go first, for a while."""
        until = asyncio.get_running_loop().time() + REST_S
        while nbytes and self._is_saving() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK_S)

    def _ended(self, setting: ServedExport, error: CheckpointdError) -> None:
        shown = self._progress[setting.to]
        shown.state, shown.problem = "over", ErrorReport.of(error)
        log.error("%s cannot be exported to %s: %s", setting.root, setting.to, error)
