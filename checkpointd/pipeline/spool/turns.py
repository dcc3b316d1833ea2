"""Whose shard is uploaded next, and when: the newest first, within the windows of the day, below a bandwidth.

Invariants
  TURN-1  Of one rank at one root, one shard is uploaded at a time; the newest that waits is next.
  TURN-2  With `keep="newest"`, a shard that waits is dropped when a newer one of its rank is in the spool. A shard whose upload
      runs is not. Nor is one that must stay: `required`, one that did not ask for `latest`, and one that retention keeps for
      good, by its step or because it may be the best.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from checkpointd.config import SpoolConfig
from checkpointd.errors import SupersededError
from checkpointd.pipeline.spool.shards import SpooledShard
from checkpointd.store.limited import TokenBucket
from checkpointd.windows import DailyWindows

log = logging.getLogger("checkpointd")

LOOK_S_MAX = 60.0
"""How often the clock is looked at while no window is open, since it may be set."""


class Pacing:
    """How fast uploads may run, and at which times. `now` gives the local time."""

    def __init__(self, config: SpoolConfig, now: Callable[[], datetime]) -> None:
        self.bucket = None if config.bandwidth_bps is None else TokenBucket(config.bandwidth_bps)
        self._windows, self._now = DailyWindows.parse(config.windows), now
        self._lifted = asyncio.Event()

    def opens_in_s(self) -> float:
        """The seconds until uploads may run; 0 if they may."""
        return 0.0 if self._lifted.is_set() else self._windows.opens_in_s(self._now())

    async def opened(self) -> None:
        """Return when uploads may run."""
        while (left_s := self.opens_in_s()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, LOOK_S_MAX)):
                    await self._lifted.wait()

    def lift(self) -> None:
        """Limit nothing from here on: the process is told to leave, and should upload what it can."""
        self._lifted.set()
        if self.bucket is not None:
            self.bucket.lift()


@dataclass(eq=False, slots=True)
class Turns:
    """The shards of one rank at one root that wait for their upload."""

    pacing: Pacing
    keep_all: bool
    _waiting: list[SpooledShard] = field(default_factory=list)
    _active: SpooledShard | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, shard: SpooledShard) -> list[SpooledShard]:
        """Let `shard` wait. Returns the older ones that are dropped for it (TURN-2)."""
        self._waiting.append(shard)
        dropped = [older for older in self._waiting if self._replaces(shard, older)]
        for older in dropped:
            older.superseded_by = shard.record.vote.tag
        self._stir()
        return dropped

    def _replaces(self, shard: SpooledShard, older: SpooledShard) -> bool:
        if self.keep_all or not shard.record.vote.save_latest or older.must_stay or older.is_superseded:
            return False
        return older.record.order < shard.record.order and not shard.is_superseded

    async def taken(self, shard: SpooledShard) -> None:
        """Return when it is the turn of `shard` (TURN-1). SupersededError if it is dropped before."""
        if shard not in self._waiting:
            self.add(shard)
        try:
            while True:
                if shard.is_superseded:
                    raise SupersededError(
                        f"{shard.prefix} was superseded in the spool by {shard.superseded_by or 'a newer save'} before its "
                        "upload had begun"
                    )
                if self._active is None and shard is max(self._waiting, key=lambda one: one.record.order):
                    opened = asyncio.ensure_future(self.pacing.opened())
                    stirred = asyncio.ensure_future(self._changed.wait())
                    try:
                        await asyncio.wait({opened, stirred}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        opened.cancel()
                        stirred.cancel()
                    if self.pacing.opens_in_s() == 0 and self._is_next(shard):
                        self._active = shard
                        return
                else:
                    await self._changed.wait()
        finally:
            self._waiting.remove(shard)
            self._stir()

    def _is_next(self, shard: SpooledShard) -> bool:
        is_newest = shard is max(self._waiting, key=lambda one: one.record.order)
        return self._active is None and is_newest and not shard.is_superseded

    def is_active(self, shard: SpooledShard) -> bool:
        """Whether `shard` is being uploaded now."""
        return self._active is shard

    def given_back(self, shard: SpooledShard) -> None:
        """The upload of `shard` has ended, or pauses."""
        if self._active is shard:
            self._active = None
            self._stir()

    def _stir(self) -> None:
        """Wake all who wait."""
        self._changed.set()
        self._changed = asyncio.Event()
