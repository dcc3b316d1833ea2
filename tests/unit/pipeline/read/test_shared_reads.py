"""Shared reads with circles inside one process: each byte is asked for once, and nothing depends on the circle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, UnreadableError
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.read.plan import ByteMemory
from checkpointd.pipeline.read.shared_reads import CircleBroken
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.shard import Bytes
from checkpointd.store.memory import MemoryStore
from tests.builders import save_checkpoint

RANKS = 3
WEIGHT = np.arange(1 << 18, dtype=np.float32)
SMALL = np.arange(100, dtype=np.float32)
PREFIX = "global_step1/00000001-0"
KEY = f"{PREFIX}/00000-0.chunks"
CONFIG = LoadConfig(block_bytes=1 << 16)


class CountingStore(MemoryStore):
    """Counts the bytes of chunks that are asked for; one read of each rank fails if `fails_at` says so."""

    asked = 0
    fails_at: int | None = None

    async def get_range(self, key: str, offset: int, into: memoryview) -> None:
        if key.endswith(".chunks"):
            self.asked += into.nbytes
            if self.fails_at is not None and offset >= self.fails_at:
                self.fails_at = None
                raise UnreadableError("the disk does not answer")
        await super().get_range(key, offset, into)


class Table:
    """Where the coroutines of a circle lay what they send. Whoever leaves ends the turns that nobody has sent."""

    def __init__(self) -> None:
        self._turns: dict[int, asyncio.Future[bytes]] = {}
        self._broken = False

    def at(self, turn: int) -> asyncio.Future[bytes]:
        future = self._turns.setdefault(turn, asyncio.get_running_loop().create_future())
        if self._broken and not future.done():
            future.cancel()
        return future

    def end(self) -> None:
        self._broken = True
        for turn in self._turns:
            self.at(turn)


class LocalCircle:
    """The circle of `RANKS` coroutines; `sent` may change or refuse what one of them sends in a turn."""

    size = RANKS

    def __init__(self, place: int, table: Table, sent: Callable[[int, bytes], bytes]) -> None:
        self.place, self._table, self._sent, self._turn, self.has_left = place, table, sent, 0, False

    async def pass_on(self, memory: memoryview, source: int) -> None:
        turn, self._turn = self._turn, self._turn + 1
        future = self._table.at(turn)
        if source == self.place and not future.cancelled():
            future.set_result(self._sent(turn, bytes(memory)))
            return
        await asyncio.wait({future})
        if future.cancelled():
            raise CircleBroken("a rank has left")
        memory[:] = future.result()

    def leave(self) -> None:
        self.has_left = True
        self._table.end()


class LocalSharing:
    def __init__(self, circle: LocalCircle, prints: list[bytes]) -> None:
        self._circle, self._prints = circle, prints

    async def join(self, reads: bytes) -> LocalCircle:
        self._prints.append(reads)
        return self._circle


async def saved() -> tuple[CountingStore, Index]:
    store = CountingStore()
    await save_checkpoint(store, world_size=1, tensors=lambda _: {"w": WEIGHT, "small": SMALL}, chunk_bytes=1 << 14)
    index = await read_index(store, await root_view.find(store, "global_step1"), 0)
    store.asked = 0
    return store, index


async def load(
    store: CountingStore, index: Index, sent: Callable[[int, bytes], bytes] = lambda _, data: data
) -> tuple[list[dict[str, Bytes]], list[list[DamagedError]]]:
    """What each rank's tensors hold after it, and the damage that each rank found."""
    table = Table()
    circles = [LocalCircle(place, table, sent) for place in range(RANKS)]
    prints: list[bytes] = []
    memory = [{"w": np.zeros(WEIGHT.nbytes, np.uint8), "small": np.zeros(SMALL.nbytes, np.uint8)} for _ in range(RANKS)]
    loads = (
        read_tensors(
            store,
            PREFIX,
            index,
            {fqn: ByteMemory(data) for fqn, data in mine.items()},
            CONFIG,
            sharing=LocalSharing(circle, prints),  # type: ignore[arg-type]  # a circle of this test
        )
        for mine, circle in zip(memory, circles, strict=True)
    )
    damage = await asyncio.gather(*loads)
    assert len(set(prints)) == 1
    assert all(circle.has_left for circle in circles)
    return memory, damage


def is_whole(memory: list[dict[str, Bytes]]) -> bool:
    return all(mine["w"].tobytes() == WEIGHT.tobytes() and mine["small"].tobytes() == SMALL.tobytes() for mine in memory)


async def test_each_byte_is_asked_for_once() -> None:
    store, index = await saved()
    memory, damage = await load(store, index)
    assert is_whole(memory)
    assert damage == [[]] * RANKS
    assert WEIGHT.nbytes + SMALL.nbytes <= store.asked < WEIGHT.nbytes + SMALL.nbytes + (1 << 13)  # padding of pages


async def test_share_1_wrong_bytes_of_another_rank_are_read_again() -> None:
    store, index = await saved()
    memory, damage = await load(store, index, lambda turn, data: data if turn % 2 else bytes(len(data)))
    assert is_whole(memory)
    assert damage == [[]] * RANKS


async def test_share_1_damage_of_the_storage_is_damage_on_every_rank() -> None:
    store, index = await saved()
    data = bytearray(await store.get(KEY))
    data[100] ^= 1
    await store.put(KEY, bytes(data))
    _, damage = await load(store, index)
    assert [[error.key for error in found] for found in damage] == [[KEY]] * RANKS


@pytest.mark.parametrize("turn", [0, 1, 7])
async def test_share_3_without_the_circle_each_rank_reads_the_rest(turn: int) -> None:
    def sent(number: int, data: bytes) -> bytes:
        if number >= turn:
            raise CircleBroken("as the test wants it")
        return data

    store, index = await saved()
    memory, damage = await load(store, index, sent)
    assert is_whole(memory)
    assert damage == [[]] * RANKS


async def test_share_3_a_read_that_failed_once_is_tried_again_without_the_circle() -> None:
    store, index = await saved()
    store.fails_at = 1 << 18
    memory, damage = await load(store, index)
    assert is_whole(memory)
    assert damage == [[]] * RANKS
