"""Which shard of the spool is uploaded next.

Invariants
  QUEUE-1  Of one rank at one root, one shard is uploaded at a time: the newest of those that the log announces, or else the
      newest.
  QUEUE-2  The ranks upload the same attempt. Otherwise saves that come faster than uploads would leave each rank with shards of
      other attempts, and few would ever be whole. So only the coordinator begins an attempt that the log does not announce
      yet, and none while another one of the same start, which it has uploaded, is undecided. It leaves the others HOLD_S: a
      rank may have lost its shard. A save waits for none of another start, whose nodes may be gone.
  QUEUE-3  With `keep="newest"`, a shard that waits is dropped once a newer save has committed. A shard whose upload runs is not
      dropped. Nor is one that must stay: `required`, one that did not ask for `latest`, and one that retention keeps for good,
      by its step or because it may be the best.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from checkpointd.commit.facts import Order
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.errors import SupersededError

HOLD_S = 600.0
"""How long the coordinator leaves the other ranks the time to upload what it has uploaded."""


@dataclass(eq=False, slots=True)
class UploadQueue:
    """The shards of one rank at one root that wait for their upload. `leads`: the rank is the coordinator."""

    leads: bool
    _waiting: dict[SpooledShard, asyncio.Event] = field(default_factory=dict)
    """With what wakes each of them. Only the next one is woken, since there may be thousands."""
    _active: SpooledShard | None = None
    _voted: dict[SpooledShard, float] = field(default_factory=dict)
    """Those that are uploaded, and not decided, and until when others wait for them."""

    def add(self, shard: SpooledShard) -> None:
        """Let `shard` wait."""
        self._waiting.setdefault(shard, asyncio.Event())
        self._stir()

    def announced(self, shard: SpooledShard) -> None:
        """The log announces the attempt of `shard`."""
        shard.in_log = True
        self._stir()

    async def taken(self, shard: SpooledShard) -> None:
        """Return when `shard` is to be uploaded. SupersededError if it is dropped before."""
        self.add(shard)
        woken = self._waiting[shard]
        try:
            while shard is not self._next():
                if shard.is_superseded:
                    raise SupersededError(
                        f"{shard.prefix} was superseded in the spool by {shard.superseded_by or 'a newer save'} before its "
                        "upload had begun"
                    )
                woken.clear()
                await woken.wait()
            self._active = shard
        finally:
            self.leave(shard)

    def leave(self, shard: SpooledShard) -> None:
        """Wait no more for the upload of `shard`: it has begun, or there is nothing to upload any more."""
        self._waiting.pop(shard, None)
        self._stir()

    def is_active(self, shard: SpooledShard) -> bool:
        """Whether `shard` is being uploaded now."""
        return self._active is shard

    def given_back(self, shard: SpooledShard, *, voted: bool) -> None:
        """The upload of `shard` has ended, or pauses."""
        if self._active is shard:
            self._active = None
            if voted:
                loop = asyncio.get_running_loop()
                self._voted[shard] = loop.call_later(HOLD_S, self._stir).when()
            self._stir()

    def ended(self, shard: SpooledShard) -> None:
        """The attempt of `shard` is decided, or this process works at it no longer."""
        self._voted.pop(shard, None)
        self.leave(shard)

    def drop_older(self, order: Order, tag: str) -> list[SpooledShard]:
        """The save `tag` with this `order` has committed. Drop the older ones that it replaces, and return them (QUEUE-3)."""
        older = [one for one in self._waiting if one.record.order < order and not one.must_stay and not one.is_superseded]
        for one in older:
            one.superseded_by = tag
            self._waiting[one].set()
        return older

    def _next(self) -> SpooledShard | None:
        if self._active is not None:
            return None
        found = [one for one in self._waiting if not one.is_superseded]
        newest = max(found, key=lambda one: (one.in_log, one.record.order), default=None)
        return newest if newest is None or newest.in_log or (self.leads and not self._waits_for_others(newest)) else None

    def _waits_for_others(self, shard: SpooledShard) -> bool:
        start, now = shard.record.attempt.start, asyncio.get_running_loop().time()
        return any(one.record.attempt.start == start and now < until for one, until in self._voted.items())

    def _stir(self) -> None:
        if (shard := self._next()) is not None:
            self._waiting[shard].set()
