"""The announcement of one attempt in the root's log: one rank makes it, the others wait until they see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from checkpointd.commit.branches import base_in
from checkpointd.commit.log import check, is_admitted
from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.errors import CheckpointdError, RootGoneError, StoreError
from checkpointd.layout.log_records import AnnounceRecord, LoggedAttempt, LogState, Record
from checkpointd.pipeline.pauses import pauses
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.system_errors import lasts

log = logging.getLogger("checkpointd")

ANNOUNCED_S = 1.0
"""How long rank 1 waits for the coordinator to announce an attempt. Rank 20 waits twice as long."""


def base_of(persist: PersistConfig, state: LogState) -> str:
    """The checkpoint in `state` to which a save may refer (LOG-10). No method: the announcement would keep the attempt alive,
    and with it the snapshot.
    """
    return base_in(state) if persist.dedup or persist.full_every is not None else ""


@dataclass(slots=True, eq=False)
class Announcement:
    """The announcement of the attempt `info`, as this rank makes it or sees it. `check_root` raises if the root is not the
    job's own. `base`: the checkpoint (`<tag>/<attempt>`) in a state to which the attempt may refer; empty for none.
    """

    info: AttemptInfo
    log: RootLog
    commit: CommitConfig
    check_root: Callable[[], Awaitable[None]]
    base: Callable[[LogState], str] = lambda _: ""
    stands_in: bool = False
    """Whether this rank has made it in place of the coordinator."""
    _stands: bool = False
    """Whether the log has shown it, proved and durable."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def seen(self) -> LoggedAttempt | None:
        """The attempt, as of the last look at the log."""
        return self.log.state.attempts.get(self.info.prefix)

    async def make_early(self) -> None:
        """Make it while the snapshot is taken, so that no rank waits for it later."""
        try:
            await self.make()
        except Exception as error:  # ATTEMPT-1; it is tried again before the first object is put
            log.info("%s: it is not announced yet: %s", self.info.prefix, error)

    async def make(self) -> None:
        """Make it, unless it stands. Raises FencedError if a newer start does not admit the attempt, RootGoneError if there are
        objects of an attempt with its name, which the log has lost (LOG-8), StoreError if the log does not take it otherwise.
        """
        async with self._turn:
            if self._stands:
                return
            await self.check_root()
            is_there = self.seen is None and bool(await self.log.store.list(self.info.prefix))
            await self.log.look(whole=False)  # so that no entry follows a gap, if somebody has put back an older log (LOG-12)
            if is_there and self.seen is None:
                raise RootGoneError(
                    f"{self.info.prefix} has objects, and the log of {self.log.store.url} does not know it: an older log was "
                    "put in its place. Nothing is written; end the job and start it again"
                )
            state = await self.log.append(self._wanted)
            if self.seen is None:
                starts.refuse_fenced(self.log.store, state, self.info.attempt.start, self.info.prefix)
                raise StoreError(f"{self.info.prefix} cannot be announced: {check(state, self._record(state))}")
            self._stands = True

    def _wanted(self, state: LogState) -> list[Record]:
        is_new = self.info.prefix not in state.attempts and is_admitted(state, self.info.prefix)
        self.stands_in = is_new and self.info.rank != COORDINATOR
        return [self._record(state)] if is_new else []

    def _record(self, state: LogState) -> AnnounceRecord:
        n = self.info.n if self.info.rank == COORDINATOR else -1  # others may have begun other saves than the coordinator
        return AnnounceRecord(attempt=self.info.prefix, n=n, step=self.info.step, base=self.base(state))

    async def awaited(self, deadline: float) -> None:
        """Return when it stands. A rank that is not the coordinator waits first, longer the greater its rank, so that not all
        ranks make it at once, and at most halfway to `deadline`. Raises as `make`.
        """
        loop, said = asyncio.get_running_loop(), ""
        until = min((loop.time() + deadline) / 2, loop.time() + ANNOUNCED_S + self.info.rank * ANNOUNCED_S / 20)
        delays = pauses(self.commit, self.log.store.capabilities, self.info.world_size)
        while self.info.rank != COORDINATOR and not self._stands and loop.time() < until:
            try:
                if await self.log.follow(self._can_be_told):
                    self._stands = self.seen is not None
                    break
            except CheckpointdError as error:
                if str(error) != said:
                    log.warning("%s: whether it is announced cannot be told: %s", self.info.prefix, error)
                said = str(error)
            await asyncio.sleep(next(delays))
        while True:
            try:
                return await self.make()
            except StoreError as error:
                if loop.time() >= until or isinstance(error, RootGoneError) or lasts(error):
                    raise
                log.warning("%s: it cannot be announced: %s; trying again", self.info.prefix, error)
            await asyncio.sleep(next(delays))

    def _can_be_told(self, state: LogState) -> bool:
        return self.info.prefix in state.attempts or not is_admitted(state, self.info.prefix)
