"""What an attempt does with its shard in the spool: it takes the snapshot in, waits for its turn, uploads, and votes.

Invariants
  SPOOL-9  While the root is away, an upload is tried again until the attempt is decided or its deadline passes. So is a no of
      this rank. Only a newer start, a lost reference and damage in the spool end the upload. A disk that does not give the
      bytes, try after try for UNREAD_S, counts as damage. Meanwhile, the shard keeps no other one from its turn.
  SPOOL-10  Once this rank has tried to put its yes, the shard is not dropped for a newer save, since the vote may exist.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.errors import CheckpointdError, DamagedError, LinkError, StoreError, SupersededError
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.announcement import Announcement
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, ShardProgress
from checkpointd.pipeline.spool.own import OwnSpool
from checkpointd.pipeline.spool.queue import UploadQueue
from checkpointd.pipeline.spool.shards import SpooledShard
from checkpointd.pipeline.spool.uploads import SpoolUnreadError, Upload
from checkpointd.pipeline.workers import unless
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.rates import Rates
from checkpointd.pipeline.write.vote import has_voted, put_yes
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0
"""The pause after an upload that failed, which doubles each time."""
UNREAD_S, UNREAD_TRIES = 600.0, 5
"""A shard counts as lost if the spool's disk has given no bytes for so long, and in so many tries in a row."""
ROOM_S = 60.0
"""An upload waits at most half of this until retention has made room at the root: the slot is free, so nobody else waits."""


class WriterParts(Protocol):
    """What a rank's attempts share (`writer_state.py`)."""

    store: Store
    persist: PersistConfig
    commit: CommitConfig
    rates: Rates
    tidier: Tidier


@dataclass(frozen=True, slots=True)
class SpoolHooks:
    """Parts of the attempt. `ends_fenced` puts the abort if there is a newer start, and says so. `check_stop` raises Stopped
    if the attempt was decided meanwhile. `over`: set when nothing more needs to be written.
    """

    check_root: Callable[[], Coroutine[Any, Any, None]]
    ends_fenced: Callable[[], Coroutine[Any, Any, bool]]
    check_stop: Callable[[], None]
    over: asyncio.Event
    announcement: Announcement


@dataclass(eq=False, slots=True)
class SpoolSide:
    """The spool's part in the attempt `info`. `shard` is set once the shard is in the spool."""

    own: OwnSpool
    state: WriterParts
    info: AttemptInfo
    progress: ShardProgress
    hooks: SpoolHooks
    shard: SpooledShard | None = None
    index: Index | None = None
    """This rank's durable index at the root, without its tree."""
    is_left: bool = False
    """Whether this process has left the shard to the next one on this node."""
    _said: str = ""
    _has_room: bool = False
    _has_ended: bool = False

    def __post_init__(self) -> None:
        if self.shard is not None:
            self.progress.upload_total = self.shard.nbytes

    @property
    def is_there(self) -> bool:
        """Whether the spool has a record of the shard."""
        return self.shard is not None and not self._has_ended

    async def take(self, job: PersistJob) -> bool:
        """Take the snapshot of `job` in. False if it must be written to the root instead."""
        self.shard = await self.own.take(job, self.state.commit, self.state.tidier.keeps_before)
        if self.shard is None:
            return False
        self.progress.upload_total = self.shard.nbytes
        self.own.directory.began(self.shard)
        return True

    async def upload(self, on_start: Callable[[], None]) -> bool:
        """Upload the shard and vote yes (SPOOL-9). False if the attempt ends because there is a newer start.

        Raises SupersededError if the shard was dropped for a newer one, DamagedError if the spool has damaged it, and Stopped.
        """
        assert self.shard is not None
        queue = self.own.directory.queue(self.shard)
        try:
            return await self._uploaded_in_turn(self.shard, queue, on_start)
        finally:
            queue.leave(self.shard)  # or it would keep all others from their turn

    def looked(self) -> None:
        """This process has looked at the log."""
        if self.shard is not None and not self.shard.in_log and self.hooks.announcement.seen is not None:
            self.own.directory.queue(self.shard).announced(self.shard)

    async def _uploaded_in_turn(self, shard: SpooledShard, queue: UploadQueue, on_start: Callable[[], None]) -> bool:
        pause_s, unread = PAUSE_S_MIN, list[float]()
        while True:
            await unless(self.hooks.over, queue.taken(shard))
            has_voted = False
            try:
                on_start()
                has_voted = await self._uploaded(shard)
                return has_voted
            except LinkError:
                raise
            except StoreError as error:
                unread = [*unread, asyncio.get_running_loop().time()] if isinstance(error, SpoolUnreadError) else []
                if len(unread) >= UNREAD_TRIES and unread[-1] - unread[0] >= UNREAD_S:
                    raise DamagedError(f"the spool lost this shard: {error}", rank=self.info.rank) from error
                if (cause := str(error)) != self._said:
                    log.warning("%s: rank %d cannot upload now: %s; trying again", self.info.prefix, self.info.rank, error)
                self._said = cause
                if not unread:
                    queue.add(shard)
            finally:
                queue.given_back(shard, voted=has_voted)
            await self.pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def pause(self, seconds: float = PAUSE_S_MAX) -> None:
        """Wait before the next try. Raises Stopped if the attempt was decided meanwhile."""
        await unless(self.hooks.over, asyncio.sleep(seconds))

    async def _uploaded(self, shard: SpooledShard) -> bool:
        if await unless(self.hooks.over, has_voted(self.state.store, self.info, shard.record.vote)):  # before a crash
            return True
        if await unless(self.hooks.over, self.hooks.ends_fenced()):
            return False
        await unless(self.hooks.over, self.hooks.check_root())
        loop = asyncio.get_running_loop()
        until = loop.time() + min(self.state.commit.timeout_s, ROOM_S)
        if not self._has_room:
            self.state.tidier.expect(self.info)
            await unless(self.hooks.over, self.state.tidier.room_for(self.info, until, shard.record.vote.raw_bytes))
            self._has_room = True
        await self._announce(shard, until)
        upload = Upload(
            shard=shard,
            root=self.state.store,
            config=self.state.persist,
            bucket=self.own.directory.bucket,
            progress=self.progress,
            check_stop=self.hooks.check_stop,
        )
        self.index = msgspec.structs.replace(await upload.run(), tree=b"")
        self.state.rates.measured_disk(upload.sent.nbytes, upload.sent.seconds)
        self.own.directory.counts.uploaded_bytes += upload.sent.nbytes
        self.hooks.check_stop()
        await unless(self.hooks.over, self.hooks.check_root())
        shard.may_have_voted = True  # SPOOL-10
        await put_yes(self.state.store, self.info, shard.record.vote)
        return True

    async def _announce(self, shard: SpooledShard, until: float) -> None:
        """See that the log announces the attempt."""
        await unless(self.hooks.over, self.hooks.announcement.awaited(until))
        if self.info.rank == COORDINATOR:
            await shard.try_to_note("announced")

    async def give_up(self, error: BaseException) -> None:
        """This rank votes no because of `error`, so nobody needs the bytes any more. Raises nothing."""
        shard = self.shard
        if shard is None:
            return
        try:
            if isinstance(error, SupersededError):
                await shard.note("superseded")
            await shard.drop_bytes()
        except CheckpointdError as failed:
            log.warning("%s: its bytes stay in the spool for now: %s", shard.prefix, failed)

    async def ended(self, *, committed: bool) -> None:
        """The attempt is decided."""
        if self.shard is not None and not self._has_ended:
            self._has_ended = True
            await self.own.directory.ended(self.shard, committed=committed)
        elif self.shard is None and committed and self.info.save_latest:
            self.own.committed_at_root(self.info)

    def leave(self) -> None:
        """This process works no longer at the attempt, decided or not."""
        if self.shard is not None and not self._has_ended:
            self._has_ended = self.is_left = True
            self.own.directory.leave(self.shard)
