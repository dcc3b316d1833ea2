"""An attempt whose shard goes through the spool: the snapshot is taken in, waits for its turn, is uploaded, and voted for.

Invariants
  SPOOL-9  While the root is away, an upload is tried again until the attempt is decided or its deadline passes. So is a no of
      this rank. Only a newer start, a lost reference and damage in the spool end the upload. A disk that does not give the
      bytes, try after try for UNREAD_S, counts as damage. Meanwhile, the shard keeps no other one from its turn.
  SPOOL-10  Once this rank has tried to put its yes, the shard is not dropped for a newer save, since the vote may exist.
  SPOOL-12  The snapshot is free, and the phase `spooled` is reported, as soon as the shard is durable in the spool (SPOOL-1 in
      `shards.py`). From then on, and after its vote, a rank waits as long as the spool's time-out says.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import ClassVar

import msgspec

from checkpointd.commit.machine import IN_SPOOL, Event, Phase
from checkpointd.daemon.spool.own import OwnSpool
from checkpointd.daemon.spool.queue import UploadQueue
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.daemon.spool.uploads import SpoolUnreadError, Upload
from checkpointd.errors import CheckpointdError, DamagedError, FencedError, LinkError, StoreError, SupersededError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import Attempt
from checkpointd.pipeline.attempt_errors import is_out_of_reach
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, Shard, ShardProgress
from checkpointd.pipeline.workers import Stopped, unless
from checkpointd.pipeline.write.vote import has_voted, put_yes
from checkpointd.pipeline.writer_state import WriterState

log = logging.getLogger("checkpointd")

PAUSE_S_MIN, PAUSE_S_MAX = 1.0, 30.0
"""The pause after an upload that failed, which doubles each time."""
UNREAD_S, UNREAD_TRIES = 600.0, 5
"""A shard counts as lost if the spool's disk has given no bytes for so long, and in so many tries in a row."""
ROOM_S = 60.0
"""An upload waits at most half of this until retention has made room at the root: the slot is free, so nobody else waits."""
UPLOAD_POLL_S, SPOOL_POLL_S = 5.0, 60.0
"""The longest pause between two looks for the outcome of an attempt that is uploaded for long, here or by other ranks, and of
one that waits in the spool: many may wait, and each look is a request to the root."""
SPOOL_POLL_S_MIN = 1.0
"""The shortest pause in the spool, where a rank waits until the coordinator has announced the attempt."""


class SpooledAttempt(Attempt):
    """An attempt of a daemon with a spool. `shard`: what an earlier daemon has left in it; then there is no snapshot."""

    begins_early: ClassVar[bool] = False  # the root need not be there until the upload, and many snapshots may come before that
    base_s: ClassVar[float | None] = 10.0  # SPOOL-7

    def __init__(
        self,
        state: WriterState,
        info: AttemptInfo,
        own: OwnSpool,
        *,
        deadline: float,
        progress: ShardProgress | None = None,
        on_phase: Callable[[Phase], None] = lambda _: None,
        on_free: Callable[[], None] = lambda: None,
        shard: SpooledShard | None = None,
    ) -> None:
        super().__init__(state, info, deadline=deadline, progress=progress, on_phase=on_phase, on_free=on_free, outlives=True)
        self._own, self._shard = own, shard
        self._entered_at = self._began
        self._said, self._has_room, self._is_over = "", False, False
        if shard is not None:
            self.phase = Phase.SPOOLED
            self.progress.upload_total = shard.nbytes
            self._deadline = self._began + own.left_s(shard)
            if shard.is_announced:
                self._on_root()

    @property
    def is_in_spool(self) -> bool:
        """Whether the spool has the shard, so that the next daemon on this node could go on with it."""
        return self._shard is not None and not self._is_over

    # --- the shard -------------------------------------------------------------------------------------------

    async def _work(self, staged: Awaitable[Shard] | None) -> None:
        if self._shard is not None:
            await self._ended_well(self._upload(self._shard))
        else:
            await super()._work(staged)

    async def _persist_at_root(self, shard: Shard) -> None:
        """Persist the shard in the spool, or else at the root."""
        if not self.info.unfinished:
            self._fire(Event.PERSIST_STARTED)
            taken = await self._own.take(await self._job(shard), self._state.commit, self._state.tidier.keeps_before)
            if taken is not None:
                self._shard = taken
                self.progress.upload_total = taken.nbytes
                self._own.directory.began(taken)
                self._fire(Event.SPOOLED)
                self._let_go()
                del shard
                await self._upload(taken)
                return
            self.progress.begin(0)
        await super()._persist_at_root(shard)

    async def _upload(self, shard: SpooledShard) -> None:
        """Upload the shard and vote yes (SPOOL-9), unless the attempt ends because there is a newer start.

        Raises SupersededError if the shard was dropped for a newer one, DamagedError if the spool has damaged it, and Stopped.
        """
        queue = self._own.directory.queue(shard)
        try:
            if await self._uploaded_in_turn(shard, queue):
                self._fire(Event.VOTED_YES)
        finally:
            queue.leave(shard)  # or it would keep all others from their turn

    async def _uploaded_in_turn(self, shard: SpooledShard, queue: UploadQueue) -> bool:
        pause_s, unread = PAUSE_S_MIN, list[float]()
        while True:
            await unless(self._over, queue.taken(shard))
            voted = False
            try:
                if self.phase is Phase.SPOOLED:
                    self._fire(Event.UPLOAD_STARTED)
                voted = await self._uploaded(shard)
                return voted
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
                queue.given_back(shard, voted=voted)
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    async def _pause(self, seconds: float = PAUSE_S_MAX) -> None:
        """Wait before the next try. Raises Stopped if the attempt was decided meanwhile."""
        await unless(self._over, asyncio.sleep(seconds))

    async def _uploaded(self, shard: SpooledShard) -> bool:
        """Upload the shard, and vote. False if there is a newer start."""
        over, state = self._over, self._state
        if await unless(over, has_voted(self._store, self.info, shard.record.vote)):  # before a crash
            return True
        if await unless(over, self._ends_fenced()):
            return False
        await unless(over, self._check_root())
        until = asyncio.get_running_loop().time() + min(state.commit.timeout_s, ROOM_S)
        if not self._has_room:
            state.tidier.expect(self.info)
            await unless(over, state.tidier.room_for(self.info, until, shard.record.vote.raw_bytes))
            self._has_room = True
        await unless(over, self._announcement.awaited(until))
        if self.info.rank == COORDINATOR:
            await shard.try_to_note("announced")
        upload = Upload(
            shard=shard,
            root=self._store,
            config=state.persist,
            bucket=self._own.directory.bucket,
            progress=self.progress,
            check_stop=self._check_stop,
        )
        self._index = msgspec.structs.replace(await upload.run(), tree=b"")
        state.rates.measured_disk(upload.sent.nbytes, upload.sent.seconds)
        self._own.directory.counts.uploaded_bytes += upload.sent.nbytes
        self._check_stop()
        await unless(over, self._check_root())
        shard.may_have_voted = True  # SPOOL-10
        await put_yes(self._store, self.info, shard.record.vote)
        return True

    def _check_stop(self) -> None:
        if self._is_decided():
            raise Stopped

    async def _ends_fenced(self) -> bool:
        """Whether there is a newer start that does not spare this attempt (ATTEMPT-6). That start has aborted it, if it was
        announced. If the store does not answer, the save goes on: nothing commits without the log.
        """
        try:
            await starts.check_fence(self._store, self.info.attempt.start, self.info.prefix)
        except FencedError:
            return True
        except CheckpointdError as error:
            log.warning("%s: cannot look for a newer start: %s", self.info.prefix, error)
        return False

    # --- a no ------------------------------------------------------------------------------------------------

    async def _vote_no(self, report: ErrorReport) -> None:
        while not await self._refused(report):
            with suppress(Stopped):
                await self._pause()  # SPOOL-9
            if self._is_decided():
                return

    async def _refused(self, report: ErrorReport) -> bool:
        if self._shard is not None and self.own_error is not None:
            await self._drop_bytes(self._shard, self.own_error)
        return await super()._refused(report)

    async def _drop_bytes(self, shard: SpooledShard, error: BaseException) -> None:
        """This rank votes no because of `error`, so nobody needs the bytes any more. Raises nothing."""
        try:
            if isinstance(error, SupersededError):
                await shard.note("superseded")
            await shard.drop_bytes()
        except CheckpointdError as failed:
            log.warning("%s: its bytes stay in the spool for now: %s", shard.prefix, failed)

    def _tries_again(self, report: ErrorReport, why: Exception) -> bool:
        return report.phase in IN_SPOOL and isinstance(why, StoreError) and not is_out_of_reach(why)

    def _is_in_vain(self, why: Exception | None) -> bool:
        return False

    @property
    def _may_find_yes(self) -> bool:
        """An earlier daemon may have put the yes before it ended."""
        return True

    # --- the outcome -----------------------------------------------------------------------------------------

    async def _look_in_time(self) -> LoggedAttempt | None:
        outcome, shard = await super()._look_in_time(), self._shard
        if outcome is None and shard is not None and not shard.in_log and self._announcement.seen is not None:
            self._own.directory.queue(shard).announced(shard)
        return outcome

    def _longer(self, pause_s: float) -> float:
        """The pause grows while an attempt waits for long in its phase."""
        now = asyncio.get_running_loop().time()
        least = (now - self._entered_at) / 20
        if self.phase is Phase.SPOOLED:
            least = min(max(SPOOL_POLL_S_MIN, least), SPOOL_POLL_S)
        else:
            least = min(least, UPLOAD_POLL_S)
        return max(0.0, min(max(pause_s, least), self._deadline - now))

    async def _ended(self, *, committed: bool) -> None:
        if self._shard is not None and not self._is_over:
            self._is_over = True
            await self._own.directory.ended(self._shard, committed=committed)
        elif self._shard is None and committed and self.info.save_latest:
            self._own.committed_at_root(self.info)

    async def _leave(self) -> None:
        """If the attempt is not decided, leave the shard to the next daemon on this node."""
        if self._shard is not None:
            self._over.set()  # if this is cancelled, the upload ends by itself
            if not self._is_over:
                self._is_over = True
                self._own.directory.leave(self._shard)
                self._lease.lapse()
                return
        await super()._leave()

    def _enter(self, phase: Phase) -> None:
        self._entered_at = asyncio.get_running_loop().time()
        self._stirred.set()
        if phase in (Phase.SPOOLED, Phase.PREPARED):
            self._outlast(self._own.timeout_s)
        if phase is Phase.SPOOLED:
            self._state.reader.resume(self)  # what waits for an upload keeps nobody from reading back
        elif phase is Phase.UPLOADING:
            self._on_root()
        super()._enter(phase)
