"""A job on a loop of virtual time that saves as fast as it can, on a disk that counts what lies on it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.errors import StoreError, StoreFullError
from checkpointd.layout.keys import AttemptId, default_tag, is_bulk
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.store.base import Entry, ObjectWriter
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.builders import make_shard

PERSIST = PersistConfig(compression="none", chunk_bytes=4096, block_bytes=8192, budget_bytes=1 << 20, writes=2, encoders=2)
TIMEOUT_S = 600.0


class Disk(MemoryStore):
    """Counts the attempts that have bytes at it. Removing takes its time; so does writing. `room`: attempts that fit at all."""

    def __init__(self, rng: random.Random, *, removal_s: float = 5.0, room: int | None = None) -> None:
        super().__init__()
        self.most, self.looks, self.refused = 0, Counter[str](), 0
        self.fails, self.looking = False, asyncio.Event()
        self.looking.set()
        self._rng, self._removal_s, self._room = rng, removal_s, room

    @property
    def occupied(self) -> set[str]:
        """The attempts that have bytes here, whole or being written."""
        keys = [*self._objects, *self._open_writers]
        return {key.rpartition("/")[0] for key in keys if is_bulk(key.rpartition("/")[2])}

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        prefix = key.rpartition("/")[0]
        if self._room is not None and prefix not in self.occupied and len(self.occupied) >= self._room:
            self.refused += 1
            raise StoreFullError(f"there is no room for {key}")
        writer = await super().open_writer(key, size_hint=size_hint, size_max=size_max)
        self.most = max(self.most, len(self.occupied))
        await asyncio.sleep(self._rng.random())
        return writer

    async def delete(self, key: str, *, durable: bool = True) -> None:
        if is_bulk(key.rpartition("/")[2]):
            await asyncio.sleep(self._rng.random() * self._removal_s)
            if self.fails:
                raise StoreError("I/O error")
        await super().delete(key, durable=durable)

    async def list(self, prefix: str) -> list[Entry]:
        self.looks[prefix] += 1
        await self.looking.wait()
        return await super().list(prefix)


@dataclass
class Job:
    """Ranks that save one after another as fast as two snapshots at once allow, in one start."""

    disk: Disk
    rng: random.Random
    start: int
    world_size: int = 1
    rules: Retention = field(default_factory=Retention)
    keeps_before: tuple[int, int] = (0, 0)
    timeout_s: float = TIMEOUT_S
    read_back: bool = True
    slowness: dict[int, float] = field(default_factory=dict)
    """By rank: how long it takes until a snapshot is whole."""
    attempts: list[Attempt] = field(default_factory=list)
    states: dict[int, WriterState] = field(default_factory=dict)

    def __post_init__(self) -> None:
        commit = CommitConfig(
            timeout_s=self.timeout_s, poll_min_s=0.02, poll_max_s=0.5, retention=self.rules, read_back=self.read_back
        )
        for rank in range(self.world_size):
            self.states[rank] = WriterState(store=self.disk, persist=PERSIST, commit=commit)
            if self.keeps_before != (0, 0):
                self.states[rank].tidier.keeps_before = self.keeps_before

    async def run(self, count: int, *, tag: str | None = None, first: int = 0) -> None:
        """`count` saves by every rank, to their ends."""
        await asyncio.gather(*(self._rank(rank, range(first, first + count), tag) for rank in range(self.world_size)))
        await self.states[0].tidier.rest()

    async def _rank(self, rank: int, saves: range, tag: str | None) -> None:
        free = asyncio.Semaphore(2)
        async with asyncio.TaskGroup() as running:
            for n in saves:
                await free.acquire()
                begins = asyncio.Event()  # a writer begins saves in their order; tasks on this loop do not
                running.create_task(self._save(rank, n, tag, begins, free.release))
                await begins.wait()

    async def _save(self, rank: int, n: int, tag: str | None, begins: asyncio.Event, on_free: Callable[[], None]) -> None:
        info = AttemptInfo(
            tag=tag or default_tag(n),
            attempt=AttemptId(self.start, n if tag else 0),
            rank=rank,
            world_size=self.world_size,
            step=n,
            n=n,
            metrics=(("loss", float(n)),),
        )
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        attempt = Attempt(self.states[rank], info, deadline=deadline, on_free=on_free)
        self.attempts.append(attempt)
        begins.set()
        await attempt.run(self._snapshot(rank, n))

    async def _snapshot(self, rank: int, n: int) -> Shard:
        await asyncio.sleep(self.slowness.get(rank, 0.0) * self.rng.random())
        random_bytes = np.frombuffer(random.Random(f"{self.start} {rank} {n}").randbytes(8192), np.float32)
        return make_shard({"weight": random_bytes})

    def phases(self) -> Counter[Phase]:
        return Counter(attempt.phase for attempt in self.attempts)


def run(seed: int, main: Callable[[random.Random], Coroutine[Any, Any, None]]) -> None:
    simloop.run(seed, main(random.Random(seed)))
