"""The hold on a place of exports: if many daemons export one root to one place, only the one that holds it exports.

Invariants
  EXPORTHOLD-1  One process at a time takes the hold: it creates the lease, or replaces the lease of a process that has ended or
      has not renewed it for its length, by put-if-match. The clocks of two machines are never compared (LEASE-2).
  EXPORTHOLD-2  `check` raises if the lease was taken by another process, or could not be renewed for its length.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from checkpointd.errors import CheckpointdError, StoreError
from checkpointd.layout.keys import SERVICE
from checkpointd.layout.manifest import Lease, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root.leases import ANSWER_S, RENEWALS, Sight, Watch
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

HOLD = f"{SERVICE}/exports/lease"
"""The lease, in the place of the exports."""


class ExportHold:
    """The hold of this process on the place `store`, once `take` has returned True. For one loop."""

    def __init__(self, store: Store, job: str, sight: Sight | None = None) -> None:
        """`job`: the root that is exported, for people who meet the lease."""
        self._store, self._sight = store, sight or Sight()
        self._watch = Watch(store, HOLD, self._sight)
        self._lease = Lease(process=self._sight.process, job=job, count=0, length_s=self._sight.length_s, writer=writer())
        self._held: bytes | None = None
        """The bytes of the lease as this process put it last; None if it does not hold the place."""
        self._renewed_at = 0.0
        self._renewing: asyncio.Task[None] | None = None

    @property
    def is_held(self) -> bool:
        return self._held is not None

    @property
    def holder(self) -> Lease | None:
        """The lease of the process that held the place at the last `take`; None if there was none."""
        return self._watch.lease

    async def take(self) -> bool:
        """Try once to take the place, without waiting. Returns whether this process holds it now."""
        if self._held is not None:
            return True
        await self._watch.look()
        # It is this process's own lease if a put that seemed to fail had its effect.
        if self._watch.data is not None and not self._is_ours() and not self._watch.is_abandoned():
            return False
        if not await self._put(self._watch.data):
            return False
        self._renewing = asyncio.create_task(self._renew())
        return True

    async def check(self) -> None:
        """Raise StoreError if another process may hold the place."""
        if self._held is None:
            raise StoreError(f"another process exports to {self._store.url} by now, because this one has lost its lease there")
        if self._now() - self._renewed_at >= self._lease.length_s:
            raise StoreError(
                f"the lease at {self._store.url} was not renewed for {self._lease.length_s:g} s, so another process may hold it"
            )

    async def release(self) -> None:
        """Give the place up, so that others can export there at once. Raises nothing."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        held, self._held = self._held, None
        if held is None:
            return
        try:
            await answered(self._remove(held), ANSWER_S)
        except CheckpointdError as error:
            log.warning(
                "the lease at %s cannot be removed (%s): other processes wait %g s before they export there",
                self._store.url,
                error,
                self._lease.length_s,
            )

    async def _remove(self, held: bytes) -> None:
        # A renewal that was cancelled may have had its effect, so the process counts, and not the bytes.
        await self._watch.look()
        if self._watch.data == held or self._is_ours():
            await self._store.delete(HOLD)

    def _is_ours(self) -> bool:
        return self._watch.lease is not None and self._watch.lease.process == self._lease.process

    async def _put(self, expected: bytes | None) -> bool:
        lease, at = msgspec.structs.replace(self._lease, count=self._lease.count + 1), self._now()
        data = encode(lease)
        if not await self._store.put_if_match(HOLD, expected, data):
            return False
        self._lease, self._held, self._renewed_at = lease, data, at
        return True

    async def _renew(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(self._lease.length_s / RENEWALS)
            try:
                if not await self._put(self._held) and not await self._again():
                    log.warning("another process has taken the lease at %s, and exports there from now on", self._store.url)
                    self._held = None
                    return
                said = ""
            except CheckpointdError as error:
                if str(error) != said:
                    log.warning("the lease at %s cannot be renewed: %s; trying again", self._store.url, error)
                said = str(error)

    async def _again(self) -> bool:
        """Renew a lease whose last renewal had its effect although it seemed to fail."""
        await self._watch.look()
        return self._is_ours() and await self._put(self._watch.data)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
