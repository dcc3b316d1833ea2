"""The exports of a daemon: each rule is followed in a task of its own (FOLLOWER-1).

Invariant
  EXPORTTASK-1  One export runs at a time, so their memory does not add up. While the daemon has a save to write, it rests up to
      REST_S before each batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from checkpointd.config import ServedExport
from checkpointd.daemon.tiers.followers import Followers, opened
from checkpointd.export.following import Exporter, ExportPace
from checkpointd.export.progress import ExportProgress
from checkpointd.export.target import target_at

REST_S = 1.0
_LOOK_S = 0.05


class Exports(Followers[ServedExport, ExportProgress]):
    """All exports of one daemon. `is_saving` tells whether it has a save to write."""

    noun, doing, done = "an export", "exporting", "exported"

    def __init__(self, settings: Sequence[ServedExport], is_saving: Callable[[], bool]) -> None:
        super().__init__(settings)
        self._is_saving, self._slot = is_saving, asyncio.Semaphore()

    def _beginning(self, setting: ServedExport) -> ExportProgress:
        return ExportProgress(root=setting.root, to=setting.to)

    def _places(self, setting: ServedExport) -> tuple[str, str]:
        return setting.root, setting.to

    def _follower(self, setting: ServedExport, stores: AsyncExitStack) -> Exporter:
        root, target = opened(setting.root, stores), target_at(setting.to)
        stores.push_async_callback(target.store.close)
        return Exporter(root, target, setting, ExportPace(poll_s=setting.poll_s), turn=self._rest, slot=self._slot)

    async def _rest(self, nbytes: int) -> None:
        """Before a batch of `nbytes`: let a save that is to be written go first, for a while."""
        until = asyncio.get_running_loop().time() + REST_S
        while nbytes and self._is_saving() and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(_LOOK_S)
