"""Checks that the root's path still leads to the directory in which this job began.

Invariant
  OWNROOT-1  A writer that knows its job's start puts a vote, and appends to the log or removes anything, only if it has just
      seen the id of the root at which that start was taken, in the same directory in which it saw the id first.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field

from checkpointd.config import ABSENCE_S
from checkpointd.errors import CheckpointdError, DamagedError, FencedError, LinkError, NotFoundError, RootGoneError, StoreError
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import OwnId
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store
from checkpointd.store.identity import forget_synced
from checkpointd.store.patient import Patience
from checkpointd.system_errors import lasts

log = logging.getLogger("checkpointd")

ANSWER_S = 4.0
"""How long a store may take when a job begins. This is enough to prove that the root is another one (ABSENCE_S), and short
enough for a trainer that waits for its sidecar. The first save looks again."""


@dataclass(slots=True)
class _Known:
    """A start of this job, by its `nonce`, and the `root` at which it was seen."""

    nonce: str
    root: OwnId
    is_seen: bool = False


@dataclass(slots=True, weakref_slot=True)
class OwnRoot:
    """The starts that one rank's job has taken at the root, as its writer knows them."""

    store: Store
    _known: dict[int, _Known] = field(default_factory=dict)

    async def begun(self, start: int, nonce: str) -> None:
        """Note that the job has taken `start` at this root. Raises nothing, since the first save checks it again."""
        with suppress(CheckpointdError):
            await self.confirm(start, nonce)

    def expect(self, start: int, nonce: str) -> None:
        """Note that an earlier process of this job took `start` at this root. The next check looks for it."""
        self._known[start] = _Known(nonce, OwnId(self.store))

    async def confirm(self, start: int, nonce: str) -> StoreError | None:
        """Check another process's word that the job has taken `start` at this root.

        Raises RootGoneError if the store contradicts it, and LinkError or StoreError if the root may not be read here. Returns
        the error of a storage that fails for now: the first save looks again.
        """
        # Somebody may have removed the root of the last job, and this job made a new one, perhaps with the same inode number.
        forget_synced(self.store)
        self.expect(start, nonce)
        try:
            await answered(self._look(start, self._known[start]), ANSWER_S)
        except StoreError as error:
            if isinstance(error, LinkError | RootGoneError) or lasts(error):
                raise
            return error
        return None

    async def check(self, start: int) -> None:
        """Raise RootGoneError if the path leads to another directory (OWNROOT-1), StoreError if the storage cannot tell, and
        FencedError if there are so many newer starts that the log does not tell of this one any more.

        A start of which the writer was not told is taken for one of the root that it finds.
        """
        if start not in self._known:
            with suppress(NotFoundError):
                self.expect(start, (await starts.read(self.store, start)).nonce)
        if start in self._known:
            await self._look(start, self._known[start])

    async def is_begun(self) -> bool:
        """Whether the job has seen its newest start at the root. Raises RootGoneError if the path leads to another root now."""
        newest = next(reversed(self._known.values()), None)
        if newest is None or not newest.is_seen:
            return False
        await newest.root.check()
        return True

    async def _look(self, start: int, known: _Known) -> None:
        await known.root.check()
        if known.is_seen:
            return
        why = f"its log does not have start {start} of this job"
        with Patience(ABSENCE_S, ABSENCE_S).looks() as looks:
            while not await self._is_taken(start, known.nonce):
                if await looks.is_lost(why):  # else a file server lags behind
                    raise known.root.gone(why)
        known.is_seen = True

    async def _is_taken(self, start: int, nonce: str) -> bool:
        root_log = RootLog.of(self.store)
        if starts.is_taken(await root_log.look(whole=False), start, nonce):
            return True
        state = await root_log.look()
        if root_log.fault:
            raise DamagedError(root_log.unreadable)
        if state.begin is not None and start < state.begins[0].start:
            raise FencedError(starts.fence_message(self.store, start, state.begin))
        return starts.is_taken(state, start, nonce)
