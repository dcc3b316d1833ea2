"""A store with a bandwidth limit for all its large writes together.

Invariants
  LIMIT-1  In any stretch of T seconds at most `bytes_per_s` * T + `burst_bytes` bytes are let through, over all writers of a
      bucket.
  LIMIT-2  Every write gets its turn: writers that want bytes are served one piece each in turn, in the order in which they
      asked, however many writes each of them has under way. A wait lasts as long as one piece of each of them takes.
  LIMIT-3  Only what `open_writer` writes is limited: votes, outcomes, indexes, reads and deletions are never delayed.
  LIMIT-4  A write that is cancelled while it waits takes nothing from the others.

A write waits inside `write_at`, so whoever measures how fast this store takes bytes measures the limit: `compression="auto"`
compresses more where bandwidth is scarce.

Not aiolimiter: it serves the smallest request first, so small writes overtake a large one without bound, and it refuses a
request that is larger than its burst.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final

from typing_extensions import Buffer

from checkpointd.errors import UsageError
from checkpointd.store.base import Capabilities, ObjectWriter, Store
from checkpointd.store.passing import PassingStore

PIECE_S: Final = 0.05
"""What one piece takes at the limit: how long a writer waits for each of the others."""
PIECE_BYTES_MIN: Final = 64 * 1024
"""Smaller writes would go through the page cache (see osfile.py), which costs more than it saves."""
PIECE_BYTES_UNIT: Final = 4096
_PAUSE_S_MIN: Final = 0.001
"""Timers are no finer; a rounding error must not become a pause of nothing, for ever."""


class TokenBucket:
    """Lets `bytes_per_s` bytes through per second, and two pieces at once after a rest. For one loop.

    `clock` gives seconds and `sleep` waits for some; by default they are the running loop's.
    """

    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if not bytes_per_s > 0:
            raise UsageError(f"a limit of {bytes_per_s!r} bytes per second lets nothing through; it must be greater than 0")
        self.bytes_per_s = bytes_per_s
        self.piece_bytes = max(PIECE_BYTES_MIN, int(bytes_per_s * PIECE_S) // PIECE_BYTES_UNIT * PIECE_BYTES_UNIT)
        # Two pieces: a waiter that is woken late, as in a process with a low priority, loses nothing of the rate by it.
        self.burst_bytes = 2 * self.piece_bytes
        self._clock, self._sleep = clock, sleep
        self._tokens = float(self.burst_bytes)
        self._filled_at: float | None = None
        self._turn = asyncio.Lock()
        self._lifted = False

    def lift(self) -> None:
        """Limit nothing from here on: this process is leaving, and what is in flight should become durable before it does."""
        self._lifted = True

    async def take(self, nbytes: int) -> None:
        """Return when `nbytes` (at most `burst_bytes`) may be written; first come, first served."""
        assert nbytes <= self.burst_bytes, "cut a large write into pieces"
        async with self._turn:
            while not self._lifted and (missing := nbytes - self._refilled()) > 0:
                await self._sleep(max(missing / self.bytes_per_s, _PAUSE_S_MIN))
            self._tokens -= nbytes

    def _refilled(self) -> float:
        now = self._clock() if self._clock else asyncio.get_running_loop().time()
        since = now if self._filled_at is None else self._filled_at
        self._tokens = min(float(self.burst_bytes), self._tokens + (now - since) * self.bytes_per_s)
        self._filled_at = now
        return self._tokens


class LimitedWriter:
    """An object that is written in pieces, each as `bucket` lets it through."""

    def __init__(self, target: ObjectWriter, bucket: TokenBucket) -> None:
        self._target, self._bucket = target, bucket
        # One request of this object at a time: many writes at once give it no larger share (LIMIT-2).
        self._turn = asyncio.Lock()

    async def write_at(self, offset: int, data: Buffer) -> None:
        part = memoryview(data)
        part = part.cast("B") if part.nbytes else memoryview(b"")
        for start, stop in pieces(offset, part.nbytes, self._bucket.piece_bytes):
            async with self._turn:
                await self._bucket.take(stop - start)
            await self._target.write_at(offset + start, part[start:stop])

    async def finish(self, size: int) -> None:
        await self._target.finish(size)

    async def discard(self) -> None:
        await self._target.discard()


def pieces(offset: int, nbytes: int, piece_bytes: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of each piece of a write of `nbytes` at `offset`: at most `piece_bytes` long, cut only where blocks end.

    A write of nothing is one piece. `piece_bytes` is a multiple of PIECE_BYTES_UNIT.
    """
    start = 0
    while True:
        whole = start + piece_bytes
        stop = nbytes if whole >= nbytes else whole - (offset + whole) % PIECE_BYTES_UNIT
        yield start, stop
        if stop >= nbytes:
            return
        start = stop


class LimitedStore(PassingStore):
    """`store`, with its large writes limited by `bucket`. Closing it closes `store`."""

    def __init__(self, store: Store, bucket: TokenBucket) -> None:
        super().__init__(store)
        self._bucket = bucket

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._store.capabilities, piece_bytes=self._bucket.piece_bytes)

    @property
    def uncached(self) -> Store:
        return LimitedStore(self._store.uncached, self._bucket)

    async def open_writer(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        return LimitedWriter(await self._store.open_writer(key, size_hint=size_hint), self._bucket)
