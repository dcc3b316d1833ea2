"""The spool of this daemon: what its trainers' saves go through, and what an earlier daemon has left in it.

Invariants
  NODESPOOL-1  Before the first trainer connects, every shard that an earlier daemon has left is a save job of this one, so a
      start hears of it as of any attempt in flight. A shard whose root does not answer yet becomes one when it does.
  NODESPOOL-2  One daemon at a time uses a spool.
"""

from __future__ import annotations

import asyncio
import logging
import os

from checkpointd.config import PersistConfig, SpoolConfig
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.jobs import SaveJob
from checkpointd.daemon.spool.directory import SpoolDirectory
from checkpointd.daemon.spool.own import OwnSpool
from checkpointd.daemon.spool.places import DiskPlace, hold, name_of
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.daemon.status.model import SpoolStatus
from checkpointd.errors import CheckpointdError, StoreError, UsageError
from checkpointd.pipeline.writer_state import WriterState
from checkpointd.store.posix.users import User

log = logging.getLogger("checkpointd")

TRY_S = 10.0
"""How often a root that does not answer is asked again."""
MEASURE_S = 10.0
"""How often the room in the spool is measured."""
StateKey = tuple[str, int, int, str]
"""Root, user, rank and nonce of the start."""


class NodeSpool:
    """The spool of one daemon. `hub` has its jobs."""

    def __init__(self, hub: Hub, config: SpoolConfig) -> None:
        self.directory = SpoolDirectory(config, DiskPlace(config.directory))
        self._hub = hub
        self._lock = hold(config.directory)
        self._states: dict[StateKey, tuple[WriterState, OwnSpool]] = {}
        self._later: set[asyncio.Task[None]] = set()
        self._measuring: asyncio.Task[None] | None = None

    async def own(self, root: str, user: User | None, nonce: str, uid: int) -> OwnSpool | None:
        """The spool for the saves of one rank's start; None if its disk fails, since saves then go straight to the root."""
        try:
            return OwnSpool(self.directory, await self.directory.at(root, user), nonce, uid)
        except CheckpointdError as error:
            log.error("the spool %s cannot be used: %s", self.directory.config.directory, error)
            return None

    def path(self, root: str, user: User | None) -> str:
        """Where the shards of `root` lie."""
        return f"{self.directory.config.directory}/{name_of(root, user)}"

    # --- what was left -------------------------------------------------------------------------------------------

    async def take_up(self) -> None:
        """Make save jobs of the shards that an earlier daemon has left (NODESPOOL-1). Raises nothing."""
        self._measuring = asyncio.get_running_loop().create_task(self._measure())
        try:
            found = await self.directory.found()
        except CheckpointdError as error:
            log.error("what is left in the spool %s cannot be read: %s", self.directory.config.directory, error)
            return
        removed = await self.directory.sweep()
        if removed:
            log.info("%d unfinished objects were removed from the spool", removed)
        if found:
            log.warning("the spool has %d shards that an earlier daemon has left: they are uploaded now", len(found))
        await asyncio.gather(*map(self._take_up, found))

    async def _take_up(self, shard: SpooledShard) -> None:
        self.directory.live.add(shard)
        if not await self._begun(shard):
            task = asyncio.get_running_loop().create_task(self._try_on(shard))
            self._later.add(task)
            task.add_done_callback(self._later.discard)

    async def _try_on(self, shard: SpooledShard) -> None:
        while not await self._begun(shard):
            await asyncio.sleep(TRY_S)

    async def _begun(self, shard: SpooledShard) -> bool:
        """Make a save job of `shard`. False if its root does not answer now."""
        record = shard.record
        try:
            state, own = await self._state(shard)
        except StoreError as error:
            log.warning("%s: its root does not answer, so its upload waits: %s", shard.prefix, error)
            return False
        except CheckpointdError as error:
            log.error("%s stays in the spool, and is not uploaded: %s", shard.prefix, error)
            self.directory.live.discard(shard)
            return True
        job = SaveJob(
            self._hub.roots.as_served(record.url),
            record.nonce,
            record.uid,
            state,
            shard.info,
            left_s=record.commit_timeout_s,
            on_change=self._hub.changed,
            spool=own,
            spooled=shard,
        )
        self._hub.jobs.add(job)
        self.directory.began(shard)
        self.directory.counts.resumed += 1
        return True

    async def _state(self, shard: SpooledShard) -> tuple[WriterState, OwnSpool]:
        record = shard.record
        root = self._hub.roots.as_served(record.url)
        key = (root, record.uid, record.vote.rank, record.nonce)
        if key not in self._states:
            user = await self.directory.place.owner(shard.spool.name)
            if record.uid not in self._hub.config.uids:
                raise UsageError(f"this daemon does not serve user {record.uid}, whose save it is; start it with --uid as well")
            store = await self._hub.roots.opened(root, user)
            own = OwnSpool(self.directory, shard.spool, record.nonce, record.uid)
            config = PersistConfig(encoders=self._hub.config.encoders)
            state = WriterState(store=store, persist=config, commit=shard.commit, waiting=self.directory.led_here)
            state.tidier.keeps_before = record.keeps_before
            state.own_root.expect(record.attempt.start, record.nonce)
            state.take_reader(self._hub.readers.setdefault((root, record.vote.rank, user), state.reader))
            self._states.setdefault(key, (state, own))  # another shard of this rank may have come meanwhile
            self._hub.tidiers.add(self._states[key][0].tidier)
        return self._states[key]

    # --- the end -------------------------------------------------------------------------------------------------

    def leaves(self) -> None:
        """The daemon is told to leave."""
        if self.directory.config.finish:
            self.directory.hurry()

    async def _measure(self) -> None:
        """Keep the room for the status up to date: shards leave, and other programs fill the disk, while nobody saves."""
        while True:
            await self.directory.measure()
            await asyncio.sleep(MEASURE_S)

    async def close(self) -> None:
        tasks = [*self._later, *([] if self._measuring is None else [self._measuring])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.directory.close()
        os.close(self._lock)

    def status(self) -> SpoolStatus:
        directory, counts, config = self.directory, self.directory.counts, self.directory.config
        room = directory.room
        waiting = [one for one in directory.live if not directory.queue(one).is_active(one)]
        return SpoolStatus(
            directory=config.directory,
            used_bytes=None if room is None else room.used,
            free_bytes=None if room is None else room.free,
            bytes_max=config.bytes_max,
            keep=config.keep,
            waiting=len(waiting),
            waiting_bytes=sum(one.nbytes for one in waiting),
            bandwidth_bps=config.bandwidth_bps,
            spooled=counts.spooled,
            uploaded=counts.uploaded,
            uploaded_bytes=counts.uploaded_bytes,
            superseded=counts.superseded,
            direct_full=counts.direct_full,
            direct_failed=counts.direct_failed,
            damaged=counts.damaged,
            resumed=counts.resumed,
        )
