"""Saves through a spool in memory, in virtual time: a root that can be away, ranks with spools of their own, restarts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig, LoadConfig, PersistConfig, SpoolConfig
from checkpointd.daemon.spool.directory import SpoolDirectory
from checkpointd.daemon.spool.own import OwnSpool
from checkpointd.daemon.spool.places import Room
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.daemon.spool.spooled_attempt import SpooledAttempt
from checkpointd.errors import StoreError, UnreadableError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.read.verify import verify
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.store.base import Entry, ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.users import User
from checkpointd.testing import simloop
from tests.builders import make_shard, rank_arrays

HOUR_S = 3600.0
READS = {"get", "get_range", "get_each", "get_parts", "list", "stat", "settle"}


class AwayStore(PassingStore):
    """`store`, which refuses every call while it is `away`, and counts the bytes that are written."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.away = False
        self.written = 0
        self.opened: list[str] = []

    def _check(self, *, reads: bool) -> None:
        if self.away:
            raise (UnreadableError if reads else StoreError)("the bucket is away")

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self._check(reads=False)
        return await super().put_if_absent(key, data, durable=durable)

    async def put(self, key: str, data: bytes) -> None:
        self._check(reads=False)
        await super().put(key, data)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._check(reads=False)
        return await super().put_if_match(key, expected, data)

    async def delete(self, key: str, *, durable: bool = True) -> None:
        self._check(reads=False)
        await super().delete(key, durable=durable)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self._check(reads=False)
        self.opened.append(key)
        return _Counted(self, await super().open_writer(key, size_hint=size_hint, size_max=size_max))

    async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
        self._check(reads=True)
        return await super().get(key, size_max=size_max)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self._check(reads=True)
        await super().get_range(key, offset, out)

    async def list(self, prefix: str) -> list[Entry]:
        self._check(reads=True)
        return await super().list(prefix)

    async def stat(self, key: str) -> int | None:
        self._check(reads=True)
        return await super().stat(key)

    async def settle(self, key: str) -> None:
        self._check(reads=True)
        await super().settle(key)


class _Counted:
    def __init__(self, store: AwayStore, target: ObjectWriter) -> None:
        self._store, self._target = store, target

    async def write_at(self, offset: int, data: Any) -> None:
        self._store._check(reads=False)
        await self._target.write_at(offset, data)
        self._store.written += memoryview(data).nbytes

    async def finish(self, size: int) -> None:
        self._store._check(reads=False)
        await self._target.finish(size)

    async def discard(self) -> None:
        await self._target.discard()


@dataclass(slots=True)
class MemoryPlace:
    """A spool in memory. `limit`: bytes of its disk."""

    limit: int = 1 << 40
    stores: dict[str, Store] = field(default_factory=dict)
    made: Callable[[str], Store] = MemoryStore

    def open(self, name: str, user: User | None) -> Store:
        if name not in self.stores:
            self.stores[name] = self.made(name)
        return self.stores[name]

    async def names(self) -> list[str]:
        return sorted(self.stores)

    async def owner(self, name: str) -> User | None:
        return None

    async def room(self) -> Room:
        used = sum([size_of(store) for store in self.stores.values()])
        return Room(used, self.limit - used, self.limit)

    @property
    def keys(self) -> list[str]:
        """The keys of all objects in it."""
        return sorted(key for store in self.stores.values() for key in contents(store))


def contents(store: Store) -> dict[str, memoryview]:
    """The objects of a MemoryStore, also one that is wrapped."""
    while isinstance(store, PassingStore):
        store = store._store
    assert isinstance(store, MemoryStore)
    return store._objects


def size_of(store: Store) -> int:
    """The bytes in a MemoryStore; 0 for a store on a simulated disk."""
    return sum(data.nbytes for data in contents(store).values()) if isinstance(store, MemoryStore) else 0


def damage(store: Store, key: str, at: int) -> None:
    """Flip a bit of an object."""
    data = bytearray(contents(store)[key])
    data[at] ^= 1
    contents(store)[key] = memoryview(bytes(data))


def arrays(step: int, rank: int = 0, nbytes: int = 1 << 16) -> dict[str, Any]:
    """A state that differs for each step and rank."""
    random = np.random.default_rng(1000 * step + rank)
    return {**rank_arrays(rank), "model.large": random.integers(0, 255, nbytes, np.uint8)}


@dataclass(slots=True)
class Node:
    """One rank with its spool. `restart` makes it the node of the next process."""

    root: Store
    config: SpoolConfig
    rank: int = 0
    world_size: int = 1
    place: MemoryPlace = field(default_factory=MemoryPlace)
    start: int = 1
    nonce: str = ""
    commit: CommitConfig = field(default_factory=lambda: CommitConfig(timeout_s=600.0, read_back=False))
    persist: PersistConfig = field(default_factory=lambda: PersistConfig(compression="none", chunk_bytes=4096))
    directory: SpoolDirectory = field(init=False)
    own: OwnSpool = field(init=False)
    state: WriterState = field(init=False)
    attempts: list[Attempt] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    """How many phases each save had entered when its slot became free."""
    phases: list[list[tuple[float, Phase]]] = field(default_factory=list)
    saves: int = 0

    async def begin(self) -> Node:
        self.directory = SpoolDirectory(self.config, self.place, clock=asyncio.get_running_loop().time)
        self.own = OwnSpool(self.directory, await self.directory.at(self.root.url), self.nonce, os.geteuid())
        self.state = WriterState(store=self.root, persist=self.persist, commit=self.commit, waiting=self.directory.led_here)
        return self

    def save(
        self,
        step: int,
        *,
        required: bool = False,
        save_latest: bool = True,
        nbytes: int = 1 << 16,
        state: dict[str, Any] | None = None,
    ) -> Attempt:
        """Begin a save of `step`, of `state` or of one that differs for each step."""

        async def staged() -> Shard:
            return make_shard(arrays(step, self.rank, nbytes) if state is None else state)

        return self.run(
            AttemptInfo(
                tag=f"global_step{step}",
                attempt=AttemptId(self.start, 0),
                rank=self.rank,
                world_size=self.world_size,
                step=step,
                n=self.saves,
                save_latest=save_latest,
                required=required,
            ),
            staged(),
        )

    def run(self, info: AttemptInfo, staged: Awaitable[Shard], spooled: SpooledShard | None = None) -> Attempt:
        loop = asyncio.get_running_loop()
        seen: list[tuple[float, Phase]] = []
        self.phases.append(seen)
        attempt = SpooledAttempt(
            self.state,
            info,
            self.own,
            deadline=loop.time() + self.commit.timeout_s,
            on_phase=lambda phase: seen.append((loop.time(), phase)),
            on_free=lambda: self.freed.append(len(seen)),
            shard=spooled,
        )
        self.saves += 1
        self.attempts.append(attempt)
        self.tasks.append(loop.create_task(attempt.run(staged)))
        return attempt

    async def over(self) -> None:
        """Wait until all attempts have ended."""
        await asyncio.gather(*self.tasks)

    async def dies(self) -> None:
        """The process ends at once: nothing of it goes on."""
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)

    async def restarts(self) -> Node:
        """The node of the next process, which goes on with what lies in the spool."""
        node = Node(
            self.root,
            self.config,
            self.rank,
            self.world_size,
            self.place,
            self.start,
            self.nonce,
            self.commit,
            self.persist,
        )
        await node.begin()
        for shard in await node.directory.found():
            node.directory.began(shard)
            node.run(shard.info, asyncio.get_running_loop().create_future(), shard)
        return node


async def until(there: Callable[[], bool], step_s: float = 0.05) -> None:
    """Wait for a state, in virtual time."""
    while not there():
        await asyncio.sleep(step_s)


async def begun_root(root: Store, world_size: int = 1) -> str:
    """Begin start 1 at a root; returns its nonce."""
    return (await starts.take(root, world_size)).nonce


@contextmanager
def away(root: AwayStore) -> Iterator[None]:
    root.away = True
    yield
    root.away = False


def run(main: Coroutine[Any, Any, None], seed: int = 1) -> None:
    simloop.run(seed, main)


def spool(**settings: Any) -> SpoolConfig:
    return SpoolConfig(directory="/spool", **settings)


async def committed(root: Store) -> list[str]:
    """The tags of the checkpoints at the root, newest first, after each was read and verified."""
    found = await root_view.checkpoints(root)
    for checkpoint in found:
        verdict = await verify(root, checkpoint, LoadConfig())
        assert verdict.whole, verdict
    return [checkpoint.tag for checkpoint in found]


async def node_at(root: Store, world_size: int = 1, *, keep: Any = "all", **settings: Any) -> Node:
    nonce = await begun_root(root, world_size)
    return await Node(root, spool(keep=keep, **settings), nonce=nonce, world_size=world_size).begin()


def phases(node: Node, at: int = 0) -> list[Phase]:
    return [phase for _, phase in node.phases[at]]
