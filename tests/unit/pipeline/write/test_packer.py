"""The packer: chunks back to back through a few blocks, in the order in which they come; errors reach whoever adds next."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from checkpointd.config import PersistConfig
from checkpointd.errors import StoreError
from checkpointd.pipeline.meter import Meter
from checkpointd.pipeline.shard import PAGE
from checkpointd.pipeline.write.packer import Packer

BLOCK = 2 * PAGE


def config(writes: int = 3, budget_bytes: int = 1 << 20) -> PersistConfig:
    return PersistConfig(chunk_bytes=4096, block_bytes=BLOCK, writes=writes, budget_bytes=budget_bytes)


class Target:
    """An object being written: keeps the bytes, counts the writes at once, and can hold them up or fail them."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.data = bytearray()
        self.writes: list[tuple[int, int]] = []
        self.at_once = self.at_once_max = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self._fail_at = fail_at

    async def write_at(self, offset: int, data: Buffer) -> None:
        self.at_once += 1
        self.at_once_max = max(self.at_once, self.at_once_max)
        await self.gate.wait()
        await asyncio.sleep(0)
        self.at_once -= 1
        if self._fail_at is not None and offset >= self._fail_at:
            raise StoreError("the disk is gone")
        part = memoryview(data)
        self.writes.append((offset, part.nbytes))
        self.data.extend(bytes(max(0, offset + part.nbytes - len(self.data))))
        self.data[offset : offset + part.nbytes] = part

    async def finish(self, size: int) -> None:
        raise AssertionError("the packer's caller finishes")

    async def discard(self) -> None:
        raise AssertionError("the packer's caller discards")


@given(st.lists(st.integers(0, 5 * BLOCK) | st.integers(0, 300), max_size=12), st.booleans())
async def test_every_chunk_lies_at_the_offset_returned_and_nothing_between(sizes: list[int], one_by_one: bool) -> None:
    target = Target()
    packer = Packer(target, config(), PAGE, Meter())
    chunks = [np.random.default_rng(n).bytes(size) for n, size in enumerate(sizes)]
    if one_by_one:
        offsets = [await packer.add(memoryview(chunk), 0) for chunk in chunks]
    else:
        offsets = list(await asyncio.gather(*(packer.add(memoryview(chunk), 0) for chunk in chunks)))
    size = await packer.flush()
    assert size == sum(sizes)
    for chunk, offset in zip(chunks, offsets, strict=True):
        assert target.data[offset : offset + len(chunk)] == chunk
    placed = sorted((offset, offset + len(chunk)) for offset, chunk in zip(offsets, chunks, strict=True) if chunk)
    assert [start for start, _ in placed] == [0, *(stop for _, stop in placed)][: len(placed)]


@given(st.lists(st.integers(1, 3 * BLOCK), min_size=1, max_size=8))
async def test_every_write_is_whole_aligned_pages_of_at_most_a_block(sizes: list[int]) -> None:
    target = Target()
    packer = Packer(target, config(), PAGE, Meter())
    for size in sizes:
        await packer.add(memoryview(bytes(size)), 0)
    await packer.flush()
    assert sorted(offset for offset, _ in target.writes) == list(range(0, sum(sizes), BLOCK))
    assert all(nbytes % PAGE == 0 and nbytes <= BLOCK for _, nbytes in target.writes)


async def test_the_padding_of_the_last_page_is_zero_although_blocks_are_used_again() -> None:
    target = Target()
    packer = Packer(target, config(writes=2), PAGE, Meter())
    await packer.add(memoryview(b"\xff" * (4 * BLOCK + 10)), 0)
    assert await packer.flush() == 4 * BLOCK + 10
    assert bytes(target.data[4 * BLOCK + 10 :]) == bytes(PAGE - 10)


@pytest.mark.parametrize("writes", [2, 3, 5])
async def test_no_more_blocks_than_writes_are_under_way_and_adding_waits_for_one(writes: int) -> None:
    target = Target()
    target.gate.clear()
    packer = Packer(target, config(writes=writes), PAGE, Meter())
    adding = asyncio.ensure_future(packer.add(memoryview(bytes(10 * BLOCK)), 0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not adding.done()
    assert target.at_once == writes
    target.gate.set()
    assert await adding == 0
    assert await packer.flush() == 10 * BLOCK
    assert target.at_once_max == writes


@pytest.mark.parametrize(("blocks_in_budget", "under_way"), [(64, 8), (32, 8), (16, 4), (12, 3)])
async def test_a_store_gets_as_many_blocks_at_once_as_it_asks_for_if_they_take_a_quarter_of_the_budget(
    blocks_in_budget: int, under_way: int
) -> None:
    target = Target()
    target.gate.clear()
    packer = Packer(target, config(budget_bytes=blocks_in_budget * BLOCK), PAGE, Meter(), at_once=8)
    adding = asyncio.ensure_future(packer.add(memoryview(bytes(20 * BLOCK)), 0))
    for _ in range(100):
        await asyncio.sleep(0)
    assert target.at_once == under_way
    target.gate.set()
    await adding
    await packer.drain()


async def test_a_failed_write_is_raised_to_the_next_who_add_and_to_flush() -> None:
    target = Target(fail_at=BLOCK)
    packer = Packer(target, config(), PAGE, Meter())
    with pytest.raises(StoreError, match="the disk is gone"):
        await packer.add(memoryview(bytes(20 * BLOCK)), 0)
    with pytest.raises(StoreError, match="the disk is gone"):
        await packer.add(memoryview(b"x"), 0)
    with pytest.raises(StoreError, match="the disk is gone"):
        await packer.flush()


async def test_those_who_wait_for_a_block_hear_of_the_failure_too() -> None:
    target = Target(fail_at=0)
    target.gate.clear()
    packer = Packer(target, config(writes=2), PAGE, Meter())
    adding = [asyncio.ensure_future(packer.add(memoryview(bytes(3 * BLOCK)), 0)) for _ in range(3)]
    for _ in range(50):
        await asyncio.sleep(0)
    target.gate.set()
    results = await asyncio.gather(*adding, return_exceptions=True)
    assert all(isinstance(result, StoreError) for result in results)


async def test_drain_waits_for_every_write_and_raises_nothing() -> None:
    target = Target(fail_at=0)
    target.gate.clear()
    packer = Packer(target, config(), PAGE, Meter())
    await packer.add(memoryview(bytes(2 * BLOCK)), 0)
    draining = asyncio.ensure_future(packer.drain())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not draining.done()
    target.gate.set()
    await draining
    assert target.at_once == 0
