"""Bytes that a store is asked for over those that the ranks of another layout need: real sizes, chunks as by default."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from checkpointd.config import LoadConfig
from checkpointd.layout.boxes import Box
from checkpointd.pipeline.read.checkpoint_view import read_view
from checkpointd.pipeline.read.load import read_boxes
from checkpointd.pipeline.read.plan import BoxRequest
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from tests.builders import Piece, save_checkpoint

ROWS, COLUMNS = 2048, 4096
"""bf16: 16 MiB, four chunks of the default size."""


class CountingStore(MemoryStore):
    """Counts the bytes that are read of chunks objects."""

    nbytes = 0

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self.nbytes += out.nbytes
        await super().get_range(key, offset, out)


def by_rows(ranks: int) -> list[Box]:
    """As FSDP2 cuts, or the slices of replicas."""
    cuts = [ROWS * rank // ranks for rank in range(ranks + 1)]
    return [Box((cuts[rank], 0), (cuts[rank + 1] - cuts[rank], COLUMNS)) for rank in range(ranks)]


def by_columns(ranks: int) -> list[Box]:
    """As tensor parallelism cuts the weights that it reduces over."""
    step = COLUMNS // ranks
    return [Box((0, step * rank), (ROWS, step)) for rank in range(ranks)]


def saved(boxes: Sequence[Box]) -> CountingStore:
    tensor = np.zeros((ROWS, COLUMNS), np.uint16)
    tensor[:] = np.arange(ROWS)[:, None]
    store = CountingStore()

    def pieces(rank: int) -> list[Piece]:
        return [Piece.part("w", tensor, boxes[rank], "bfloat16")]

    asyncio.run(save_checkpoint(store, world_size=len(boxes), tensors=lambda _: {}, pieces=pieces))
    return store


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("saves", "loads", "bound"),
    [
        (by_rows(1), by_rows(4), 1.2),
        (by_rows(2), by_rows(8), 1.2),
        (by_rows(8), by_rows(2), 1.2),
        (by_columns(2), by_rows(4), 1.2),
        (by_columns(2), by_columns(1), 1.2),
        (by_rows(4), by_rows(3), 2.0),
        (by_rows(3), by_rows(4), 2.0),
        (by_rows(2), by_rows(7), 2.0),
        (by_columns(4), by_rows(3), 2.0),
        (by_columns(4), [Box((3, 5), (2040, 4000))], 2.0),
    ],
    ids=["1to4", "2to8", "8to2", "columns-to-rows", "columns-to-1", "4to3", "3to4", "2to7", "columns-to-3", "odd"],
)
def test_bytes_read_over_bytes_needed(saves: list[Box], loads: list[Box], bound: float) -> None:
    store = saved(saves)

    async def load(box: Box) -> None:
        world = await read_view(store, await root_view.find(store, "global_step1"), LoadConfig())
        store.nbytes = 0
        assert await read_boxes(store, world, [BoxRequest("w", box, lambda *_: None)], LoadConfig()) == []

    read = 0
    for box in loads:
        asyncio.run(load(box))
        read += store.nbytes
    needed = sum(box.numel() * 2 for box in loads)
    assert needed <= read < bound * needed
