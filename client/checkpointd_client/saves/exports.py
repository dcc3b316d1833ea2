"""The exports of a job without a sidecar: rank 0 follows its own root, on a thread of its own, and with the least priority.

Invariants
  OWNEXPORT-1  No save waits for an export, and none fails because of one. While a save is in flight, an export rests up to
      REST_S before each batch.
  OWNEXPORT-2  A job that ends well waits in close() for what is due; one that was preempted, or that fails, does not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace

from checkpointd.arguments import shown
from checkpointd.bucket_urls import one_spelling
from checkpointd.config import ExportConfig
from checkpointd.errors import CheckpointdError, UsageError
from checkpointd.export.beside import check_beside
from checkpointd.export.consolidate import check_outside
from checkpointd.export.following import Exporter
from checkpointd.export.progress import ExportProgress
from checkpointd.export.target import target_at
from checkpointd.layout.manifest import ErrorReport
from checkpointd.store import open_store
from checkpointd_client.ranks.writer import WriterThread

log = logging.getLogger("checkpointd")

REST_S = 1.0
_LOOK_S = 0.05
PATIENCE_S = 600.0
"""How long close() waits for an export that does not move."""
_NICE = 19


class OwnExports:
    """The export of the root at `root`, from now on. `is_saving` tells whether a save is in flight; any thread may call it.

    Raises UsageError if the rule cannot work, NotFoundError if its `files` are not there.
    """

    def __init__(self, root: str, config: ExportConfig, is_saving: Callable[[], bool]) -> None:
        files = None if config.files is None else os.path.abspath(config.files)
        self._config = replace(config, to=one_spelling(config.to), files=files)
        check_beside(files)
        self._is_saving = is_saving
        open_store(root, read_only=True)  # refuses a root that exists only in the job's own store
        self._root = open_store(root)
        check_outside(self._root, self._config.to)
        self._target = target_at(self._config.to)
        self.progress = ExportProgress(root=self._root.url, to=self._config.to)
        """How far it has come."""
        self._exporter: Exporter | None = None
        self._on_bytes: Callable[[int], None] = lambda _: None
        self._thread = WriterThread(threads=2)
        self._running = self._thread.submit(self._run())

    async def _run(self) -> None:
        _give_way()
        try:
            self._exporter = Exporter(self._root, self._target, self._config, turn=self._rest)
            self.progress = self._exporter.progress
            await self._exporter.run()
        except CheckpointdError:
            return  # `progress` and the log have it
        except Exception as error:
            log.exception("exporting %s failed in an unforeseen way; please report it", self._root.url)
            self.progress.state, self.progress.problem = "over", ErrorReport.of(error)
        finally:
            await self._root.close()
            await self._target.store.close()

    async def _rest(self, nbytes: int) -> None:
        """Before a batch of `nbytes`: let a save that is in flight go first, for a while."""
        self._on_bytes(nbytes)
        until = asyncio.get_running_loop().time() + REST_S
        while nbytes and self._is_saving() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK_S)

    def close(self, *, finishes: bool) -> None:
        """End the exports; with `finishes`, export what is due before. Raises nothing."""
        try:
            if finishes:
                self._thread.call_with_progress_timeout(self._finish, PATIENCE_S)
            else:
                self._running.cancel()
        except (CheckpointdError, CancelledError) as error:
            log.error("the exports to %s have not ended: %s", self._config.to, error)
        finally:
            self._thread.close()

    async def _finish(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        if self._exporter is not None:
            self._exporter.finish()
        await asyncio.wrap_future(self._running)


def _give_way() -> None:
    """Give this thread, and those that it starts, the least priority; the trainer's own threads keep theirs."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    except OSError as error:
        log.info("the thread of exports keeps its priority: %s", error)


def check_export(config: object, *, has_sidecar: bool) -> None:
    """UsageError if `config` cannot be the `export` of a Checkpointer."""
    if config is None:
        return
    if not isinstance(config, ExportConfig):
        raise UsageError(f"export is {shown(config)}; it must be an ExportConfig, as in export=ExportConfig(to='/models/run1')")
    if has_sidecar:
        raise UsageError("with a sidecar, exports are the sidecar's: start that one with --export, and give no export= here")
