"""Whose shard is uploaded next, and when: the newest first, within the windows of the day, below a bandwidth.

Invariants
  TURN-1  Of one rank at one root, one shard is uploaded at a time; the newest that waits is next, after those of TURN-3.
  TURN-2  With `keep="newest"`, a shard that waits is dropped once all ranks have a newer save in their spools, or it has
      committed. Before that, the newer save may never become whole, and the older one may be the last that is. A shard whose
      upload runs is not dropped. Nor is one that must stay: `required`, one that did not ask for `latest`, and one that
      retention keeps for good, by its step or because it may be the best.
  TURN-3  The ranks upload the same attempt. The coordinator chooses, announces it, and begins no other before it is decided;
      the others take what is announced. Otherwise saves that come faster than uploads would leave each rank with shards of
      other attempts, and none would ever be whole. Who sees nothing announced for LED_S takes the newest, and the
      coordinator waits for HOLD_S at most, and not at all if a save of a newer start waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from checkpointd.commit.facts import Order
from checkpointd.config import SpoolConfig
from checkpointd.errors import SupersededError
from checkpointd.pipeline.spool.shards import SpooledShard
from checkpointd.store.limited import TokenBucket
from checkpointd.windows import DailyWindows

log = logging.getLogger("checkpointd")

LOOK_S_MAX = 60.0
"""How often the clock is looked at while no window is open, since it may be set."""
LED_S, LED_LOOK_S = 60.0, 1.0
"""How long a rank that does not lead looks for an announcement, and how often."""
WAITING_MAX = 256
"""The most shards of one rank that wait. Each has an attempt in flight, with looks at the root."""
HOLD_S = 600.0
"""How long the coordinator leaves the other ranks the time to upload what it has uploaded."""


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


Led: TypeAlias = Callable[[Collection[str]], Awaitable[Collection[str]]]
"""Tells which of some attempts the coordinator has announced, and are not decided."""


@dataclass(eq=False, slots=True)
class Turns:
    """The shards of one rank at one root that wait for their upload."""

    pacing: Pacing
    keep_all: bool
    _waiting: dict[SpooledShard, asyncio.Event] = field(default_factory=dict)
    """With what wakes each of them: if it is next, or dropped. The others sleep, since there may be thousands."""
    _active: SpooledShard | None = None
    _led: Collection[str] = ()
    """Those of the shards that wait which the coordinator has announced, when it was last looked."""
    _held_for: SpooledShard | None = None
    _held_until: float = 0.0

    def add(self, shard: SpooledShard) -> None:
        """Let `shard` wait."""
        self._waiting[shard] = asyncio.Event()
        self._stir()

    def replace_older(self, order: Order, tag: str) -> list[SpooledShard]:
        """All ranks have the save `tag` with this `order`. Drop the older ones that it replaces, and return them (TURN-2)."""
        older = [] if self.keep_all else [one for one in self._waiting if one.record.order < order]
        dropped = [one for one in older if not one.must_stay and not one.is_superseded]
        for one in dropped:
            one.superseded_by = tag
        self._stir()
        return dropped

    async def taken(self, shard: SpooledShard, led: Led | None = None) -> None:
        """Return when it is the turn of `shard` (TURN-1). SupersededError if it is dropped before. `led`: None on the
        coordinator, which leads (TURN-3).
        """
        if shard not in self._waiting:
            self.add(shard)
        began, woken = asyncio.get_running_loop().time(), self._waiting[shard]
        try:
            while True:
                if shard.is_superseded:
                    raise SupersededError(
                        f"{shard.prefix} was superseded in the spool by {shard.superseded_by or 'a newer save'} before its "
                        "upload had begun"
                    )
                woken.clear()
                if not self._is_newest(shard):
                    await woken.wait()
                elif self._active is not None or self._held_s() > 0:
                    await _either(woken, asyncio.sleep(self._held_s() or LOOK_S_MAX))
                else:
                    await _either(woken, self.pacing.opened())
                    is_open = self.pacing.opens_in_s() == 0
                    if is_open and self._is_next(shard) and await self._may_begin(shard, led, began, woken):
                        self._active = shard
                        return
        finally:
            self.forget(shard)

    def forget(self, shard: SpooledShard) -> None:
        """Wait no more for the turn of `shard`: it has begun, or there is nothing to upload any more."""
        if self._waiting.pop(shard, None) is not None:
            self._stir()

    async def _may_begin(self, shard: SpooledShard, led: Led | None, began: float, woken: asyncio.Event) -> bool:
        """Whether `shard`, which is next, may begin; otherwise another one may be next now, or some time has passed."""
        if led is None or shard.record.vote.world_size == 1:
            return True
        self._led = frozenset(await led([one.prefix for one in self._waiting]))
        if not self._is_next(shard):
            self._stir()
            return False
        if shard.prefix in self._led or asyncio.get_running_loop().time() >= began + LED_S:
            return True
        await _either(woken, asyncio.sleep(LED_LOOK_S))
        return False

    def _is_next(self, shard: SpooledShard) -> bool:
        return self._active is None and self._held_s() <= 0 and not shard.is_superseded and self._is_newest(shard)

    def _is_newest(self, shard: SpooledShard) -> bool:
        return shard is max(self._waiting, key=self._urgency, default=None)

    def _held_s(self) -> float:
        """How long the coordinator still waits for the other ranks. A save of this start waits for none of an earlier start,
        since the other ranks may have lost their shards with their nodes.
        """
        newest = max((one.record.order for one in self._waiting), default=(0, 0))
        if self._held_for is None or newest[0] > self._held_for.record.order[0]:
            return 0.0
        return max(0.0, self._held_until - asyncio.get_running_loop().time())

    def _urgency(self, shard: SpooledShard) -> tuple[bool, object]:
        return shard.prefix in self._led, shard.record.order

    @property
    def is_crowded(self) -> bool:
        """Whether so many shards wait that no more are taken into the spool."""
        return len(self._waiting) >= WAITING_MAX

    def is_active(self, shard: SpooledShard) -> bool:
        """Whether `shard` is being uploaded now."""
        return self._active is shard

    def given_back(self, shard: SpooledShard, *, leads: bool = False) -> None:
        """The upload of `shard` has ended, or pauses. `leads`: the other ranks shall follow (TURN-3)."""
        if self._active is shard:
            self._active = None
            if leads:
                self._held_for, self._held_until = shard, asyncio.get_running_loop().time() + HOLD_S
            self._stir()

    def ended(self, shard: SpooledShard) -> None:
        """The attempt of `shard` is decided, or this process works at it no longer."""
        self.forget(shard)
        if self._held_for is shard:
            self._held_for = None
            self._stir()

    def _stir(self) -> None:
        """Wake those for whom something has changed."""
        newest = max(self._waiting, key=self._urgency, default=None)
        for shard, event in self._waiting.items():
            if shard is newest or shard.is_superseded:
                event.set()


async def _either(woken: asyncio.Event, work: Coroutine[Any, Any, object]) -> None:
    """Return when `work` has ended, or `woken` is set."""
    tasks = {asyncio.ensure_future(work), asyncio.ensure_future(woken.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
