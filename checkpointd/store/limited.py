"""A store with a bandwidth limit for all its large writes together.

Invariants
  LIMIT-1  In any T seconds, all writers of a bucket together write at most `bytes_per_s` * T + `burst_bytes` bytes.
  LIMIT-2  Every writer gets its turn: the bucket serves one piece of each writer in the order in which they asked, however many
      writes a writer has started. So a writer waits at most for one piece of each other writer.
  LIMIT-3  Only `open_writer` and `open_replacement` are limited: votes, outcomes, indexes, reads and deletions are never
      delayed.
  LIMIT-4  A write that is cancelled while it waits uses up no bandwidth.

A write waits inside `write_at`, so a measurement of this store's speed includes the limit: `compression="auto"` compresses more
if bandwidth is scarce.

aiolimiter does not fit: it serves the smallest request first, so small writes overtake a large one without bound, and it
refuses a request that is larger than its burst.
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
"""How long one piece takes at the limit, and so how long a writer waits for each other writer."""
PIECE_BYTES_MIN: Final = 64 * 1024
"""Smaller writes would go through the page cache (see osfile.py) and cost more."""
PIECE_BYTES_UNIT: Final = 4096
_PAUSE_S_MIN: Final = 0.001
"""Timers are not finer. Shorter pauses could round to zero and repeat for ever."""


class TokenBucket:
    """Lets `bytes_per_s` bytes per second through, and two pieces at once after a pause. For one loop.

    `clock` returns seconds and `sleep` waits for some; by default they are the running loop's.
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
        # Two pieces: if a waiter wakes up late, as in a process with a low priority, the rate stays the same.
        self.burst_bytes = 2 * self.piece_bytes
        self._clock, self._sleep = clock, sleep
        self._tokens = float(self.burst_bytes)
        self._filled_at: float | None = None
        self._turn = asyncio.Lock()
        self._lifted = False

    def lift(self) -> None:
        """Limit nothing from here on: this process is leaving, and its saves in flight should become durable first."""
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
    """Writes an object in pieces, each when `bucket` lets it through."""

    def __init__(self, target: ObjectWriter, bucket: TokenBucket) -> None:
        self._target, self._bucket = target, bucket
        # One request of this object at a time, so that many parallel writes do not get a larger share (LIMIT-2).
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
    """(start, stop) of each piece of a write of `nbytes` at `offset`: at most `piece_bytes` long, cut between blocks.

    An empty write is one piece. `piece_bytes` is a multiple of PIECE_BYTES_UNIT.
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
    """`store`, whose large writes `bucket` limits. Closing it closes `store`."""

    def __init__(self, store: Store, bucket: TokenBucket) -> None:
        super().__init__(store)
        self._bucket = bucket

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._store.capabilities, piece_bytes=self._bucket.piece_bytes)

    @property
    def uncached(self) -> Store:
        return LimitedStore(self._store.uncached, self._bucket)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        return LimitedWriter(await self._store.open_writer(key, size_hint=size_hint, size_max=size_max), self._bucket)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        return LimitedWriter(await self._store.open_replacement(key, size_hint=size_hint), self._bucket)
