"""The announcement of one attempt in the catalog: one rank puts it, the others wait until they see it.

Invariant
  ANNOUNCE-1  A coordinator's writer that may have been replaced votes only while the catalog shows the attempt, and shows no
      outcome of it. Otherwise the attempt was decided without this writer, and may have been forgotten since. Its late vote
      could make a checkpoint of an attempt that all others know to be aborted. A newer start fences all other late writers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from checkpointd.config import CommitConfig
from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.pipeline.pauses import pauses
from checkpointd.pipeline.root.catalog_log import AnnouncementWatch, CatalogLog, record_of
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo

log = logging.getLogger("checkpointd")

ANNOUNCED_S = 1.0
"""How long rank 1 waits for the coordinator to announce an attempt. Rank 20 waits twice as long."""


class DecidedBefore(StoreError):
    """The attempt was decided without this writer, and nothing more may be put into it."""


@dataclass(slots=True, eq=False)
class CatalogAnnouncement:
    """The announcement of the attempt `info`, as this rank makes it or sees it. `check_root` raises if the root is not the
    job's own.
    """

    info: AttemptInfo
    known: CatalogLog
    watch: AnnouncementWatch
    commit: CommitConfig
    check_root: Callable[[], Awaitable[None]]
    stands_in: bool = False
    """Whether this rank has made it in place of the coordinator."""
    _stands: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def make_early(self) -> None:
        """On the coordinator, make it while the snapshot is taken, so that no rank waits for it later."""
        if self.info.rank != COORDINATOR:
            return
        try:
            await self.make()
        except Exception as error:  # ATTEMPT-1; it is tried again before the first object is put
            log.info("%s: it is not announced yet: %s", self.info.prefix, error)

    async def make(self) -> None:
        """Make it, unless this process has done so, or has seen that another one has (ATTEMPT-8)."""
        async with self._turn:
            if not self._stands:
                await self.check_root()
                info = self.info
                await self.known.append(record_of("intent", info.tag, info.attempt, n=info.n, step=info.step))
                self._stands, self.stands_in = True, info.rank != COORDINATOR

    def stood_before(self) -> None:
        """Note that an earlier process has made it."""
        self._stands = True

    async def awaited(self, deadline: float) -> None:
        """Return when it stands. A rank that is not the coordinator waits first, longer the greater its rank, so that not all
        ranks make it at once, and at most halfway to `deadline`.
        """
        loop = asyncio.get_running_loop()
        until = min((loop.time() + deadline) / 2, loop.time() + ANNOUNCED_S + self.info.rank * ANNOUNCED_S / 20)
        delays = pauses(self.commit, self.known.store.capabilities, self.info.world_size)
        while self.info.rank != COORDINATOR and not self._stands and loop.time() < until:
            try:
                self._stands = await self.watch.has_announced(self.info.prefix)
            except CheckpointdError as error:
                log.warning("%s: whether it is announced cannot be told: %s", self.info.prefix, error)
            if not self._stands:
                await asyncio.sleep(next(delays))
        await self.make()

    async def check_undecided(self) -> None:
        """Raise DecidedBefore if the catalog shows that this writer comes too late (ANNOUNCE-1)."""
        if self.info.rank != COORDINATOR or not self.info.may_be_taken_over:
            return
        await self.known.refresh()
        entry = self.known.state.entries.get(self.info.prefix)
        if not self.known.fault and (entry is None or not entry.is_open):
            raise DecidedBefore(f"{self.info.prefix} was decided before this writer voted")
