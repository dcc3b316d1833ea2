"""The spool of a process without a sidecar: its own saves go through it, and it uploads what an earlier start has left there.

Invariants
  OWNSPOOL-1  A start takes up only attempts that survive in its start: those whose shard of rank 0 lies in the spool of the
      node on which rank 0 starts. All others are decided by its recovery, and what is in the spool of them is dropped.
  OWNSPOOL-2  Each shard is uploaded by one process of this node, whichever claims it first (SPOOL-3).
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, field

from checkpointd.config import PersistConfig, SpoolConfig
from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.shard import COORDINATOR, Shard
from checkpointd.pipeline.spool.directory import SpoolDirectory
from checkpointd.pipeline.spool.own import OwnSpool
from checkpointd.pipeline.spool.places import DiskPlace, FileClaim, hold, name_of
from checkpointd.pipeline.spool.shards import SpooledShard
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

END_S = 5.0
"""How long uploads may take to end when the process closes."""


@dataclass(eq=False, slots=True)
class ProcessSpool:
    """The spool of this process for the root of `store`. All coroutines run on the writer's loop."""

    config: SpoolConfig
    store: Store
    persist: PersistConfig
    directory: SpoolDirectory = field(init=False)
    _lock: FileClaim | None = None
    _states: dict[tuple[int, str], WriterState] = field(default_factory=dict)
    """By rank and nonce of the start."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def path(self) -> str:
        """Where the shards of this root lie."""
        return f"{self.config.directory}/{name_of(self.store.url, None)}"

    async def open(self) -> None:
        """Raises UsageError if the directory cannot be used."""
        place = DiskPlace(self.config.directory)
        self._lock = hold(self.config.directory, alone=False)
        self.directory = SpoolDirectory(self.config, place)

    async def surviving(self) -> tuple[str, ...]:
        """The attempts ("tag/attempt") of earlier starts of which rank 0 left its shard here (OWNSPOOL-1)."""
        found = [one.record for one in await self._found() if one.record.vote.rank == COORDINATOR]
        begun = {(one.attempt.start, one.nonce) for one in found}
        here = {one for one in begun if await starts.is_of_root(self.store, *one)}
        return tuple(dict.fromkeys([one.prefix for one in found if (one.attempt.start, one.nonce) in here]))

    async def _found(self) -> list[SpooledShard]:
        try:
            return await self.directory.found(self.store.url)
        except CheckpointdError as error:
            log.error("what is left in the spool %s cannot be read: %s", self.config.directory, error)
            return []

    async def own(self, nonce: str) -> OwnSpool | None:
        """The spool for the saves of this rank's start; None if its disk fails, since saves then go straight to the root."""
        try:
            return OwnSpool(self.directory, await self.directory.at(self.store.url), nonce, os.geteuid())
        except CheckpointdError as error:
            log.error("the spool %s cannot be used: %s", self.config.directory, error)
            return None

    async def take_up(self, start: int) -> None:
        """Upload what earlier starts have left, in the background, and remove what they had not finished."""
        try:
            await self.directory.sweep(self.store.url, before_start=start)
        except CheckpointdError as error:
            log.warning("leftovers stay in the spool %s: %s", self.config.directory, error)
        left = [one for one in await self._found() if one.record.attempt.start < start and await one.claimed()]
        for shard in left:
            log.warning("%s: rank %d left its shard in the spool", shard.prefix, shard.record.vote.rank)
            self._begin(shard)

    def _begin(self, shard: SpooledShard) -> None:
        record, nobody = shard.record, asyncio.get_running_loop().create_future()
        key = (record.vote.rank, record.nonce)
        if key not in self._states:
            own = OwnSpool(self.directory, shard.spool, record.nonce, record.uid)
            state = WriterState(store=self.store, persist=self.persist, commit=shard.commit, spool=own)
            state.tidier.keeps_before = record.keeps_before
            state.own_root.expect(record.attempt.start, record.nonce)
            self._states[key] = state
        self.directory.began(shard)
        attempt = Attempt(self._states[key], shard.info, deadline=0.0, outlives=True, spooled=shard)
        task = asyncio.get_running_loop().create_task(self._run(attempt, nobody))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, attempt: Attempt, nobody: asyncio.Future[Shard]) -> None:
        try:
            await attempt.run(nobody)
        except Exception:  # a defect must not end the writer
            log.exception("%s: uploading what was left failed in an unforeseen way; please report it", attempt.info.prefix)
            return
        info, error = attempt.info, attempt.error
        if error is None:
            log.info("%s: rank %d: committed from the spool", info.prefix, info.rank)
        else:
            log.error("%s: rank %d: what was left in the spool did not commit: %s", info.prefix, info.rank, error)

    async def close(self) -> None:
        """Leave what is not uploaded to the next start."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=END_S)
        for state in self._states.values():
            await state.tidier.close()
            await state.reader.close()
        await self.directory.close()
        if self._lock is not None:
            self._lock.release()
