"""READPLAN-1 and READPLAN-2 of plan.py: any boxes out of any boxes, bit for bit, each chunk read once, damage named."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpointd.config import LoadConfig
from checkpointd.errors import FormatError, NotFoundError
from checkpointd.layout.boxes import Box, intersect, whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.regions import slices, sub_boxes
from checkpointd.pipeline.read import chunks
from checkpointd.pipeline.read.checkpoint_view import CheckpointView, global_tensors, read_view
from checkpointd.pipeline.read.index import chunk_starts
from checkpointd.pipeline.read.load import read_boxes
from checkpointd.pipeline.read.plan import CARRIERS, BoxMemory, BoxRequest, BoxSink
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from tests.box_strategies import Shape, shapes, tilings_of
from tests.builders import Piece, objects, save_checkpoint
from tests.small_chunk_views import small_chunk_view

CONFIG = LoadConfig(block_bytes=8192)
DTYPES = ("uint8", "bfloat16", "float32", "int64", "complex128")


class CountingStore(MemoryStore):
    """Remembers every read of a chunks object: its key and the range."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, range]] = []

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self.reads.append((key, range(offset, offset + out.nbytes)))
        await super().get_range(key, offset, out)


def noise(shape: Shape, dtype: str) -> NDArray[Any]:
    """A tensor of random bits, carried as the reader hands them out."""
    carrier = CARRIERS[ITEM_BYTES[dtype]]
    count = math.prod(shape)
    data = np.random.default_rng(count).integers(0, 256, count * carrier.itemsize, dtype=np.uint8)
    return data.view(carrier).reshape(shape)


async def saved(tensors: dict[str, tuple[NDArray[Any], str, Sequence[Box]]], ranks: int, **options: object) -> CountingStore:
    """A checkpoint of global tensors, each cut into the given boxes, which the ranks write in turn."""

    def pieces(rank: int) -> list[Piece]:
        return [
            Piece.part(fqn, tensor, box, dtype)
            for fqn, (tensor, dtype, boxes) in tensors.items()
            for number, box in enumerate(boxes)
            if number % ranks == rank
        ]

    store = CountingStore()
    await save_checkpoint(store, world_size=ranks, tensors=lambda _: {}, pieces=pieces, **options)
    return store


async def world_of(store: MemoryStore) -> CheckpointView:
    world = await read_view(store, await root_view.find(store, "global_step1"), CONFIG)
    if isinstance(store, CountingStore):
        store.reads.clear()
    return world


class Filled:
    """A wanted box as an array, and how often each of its elements came."""

    def __init__(self, box: Box, dtype: str) -> None:
        self.box = box
        self.array = np.zeros(box.sizes, CARRIERS[ITEM_BYTES[dtype]])
        self.times = np.zeros(box.sizes, np.int64)

    def sink(self, box: Box, elements: NDArray[Any]) -> None:
        assert elements.shape == box.sizes
        self.array[slices(self.box, box)] = elements
        self.times[slices(self.box, box)] += 1


def same(one: NDArray[Any], two: NDArray[Any]) -> bool:
    return one.shape == two.shape and one.tobytes() == two.tobytes()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Shape, list[Box], list[Box]]:
    """A shape, how it was saved, and how it is loaded."""
    shape = draw(shapes)
    return shape, draw(tilings_of(shape)), draw(tilings_of(shape))


@given(
    layouts(),
    st.sampled_from(DTYPES),
    st.integers(1, 4),
    st.sampled_from([16, 32, 48, 512, 1 << 20]),
    st.sampled_from(["raw", "zstd", "planes"]),
    st.sampled_from([1, 256, 1 << 20]),
)
@example(((), [whole(())], [whole(())]), "float32", 2, 16, "raw", 1)
@example(((0, 3), [whole((0, 3))], [whole((0, 3))]), "float32", 2, 16, "raw", 1)
def test_view_1_view_2_any_layout_out_of_any_other(
    layout: tuple[Shape, list[Box], list[Box]], dtype: str, ranks: int, chunk_bytes: int, codec: str, block_bytes: int
) -> None:
    asyncio.run(_check_any_layout(layout, dtype, ranks, chunk_bytes, codec, block_bytes))


async def _check_any_layout(
    layout: tuple[Shape, list[Box], list[Box]], dtype: str, ranks: int, chunk_bytes: int, codec: str, block_bytes: int
) -> None:
    shape, stored, wanted = layout
    tensor = noise(shape, dtype)
    store = CountingStore()
    world = await small_chunk_view(store, {"t": (tensor, dtype, stored)}, ranks=ranks, chunk_bytes=chunk_bytes, codec=codec)
    filled = [Filled(box, dtype) for box in wanted]
    wants = [BoxRequest("t", box.box, box.sink) for box in filled]
    assert await read_boxes(store, world, wants, LoadConfig(block_bytes=block_bytes)) == []
    for found in filled:
        assert found.array.tobytes() == tensor[slices(whole(shape), found.box)].tobytes()
        assert bool((found.times == 1).all())
    _check_each_chunk_was_read_once(store)
    store.reads.clear()
    memories = [BoxMemory(box, np.zeros(box.sizes, CARRIERS[ITEM_BYTES[dtype]])) for box in wanted]
    with mock.patch.object(chunks, "IN_PLACE_BYTES_MIN", 1):
        into = [BoxRequest("t", memory.box, memory) for memory in memories]
        assert await read_boxes(store, world, into, LoadConfig(block_bytes=block_bytes)) == []
    for memory in memories:
        assert memory.elements.tobytes() == tensor[slices(whole(shape), memory.box)].tobytes()
    _check_each_chunk_was_read_once(store)


def _check_each_chunk_was_read_once(store: CountingStore) -> None:
    times = Counter((key, at) for key, part in store.reads for at in part)
    assert set(times.values()) <= {1}


# --- only what is needed -----------------------------------------------------------------------------------------------


@given(layouts(), st.sampled_from([16, 48]))
def test_view_1_only_chunks_with_a_wanted_element_are_read(
    layout: tuple[Shape, list[Box], list[Box]], chunk_bytes: int
) -> None:
    asyncio.run(_check_reads(*layout, chunk_bytes))


async def _check_reads(shape: Shape, stored: list[Box], wanted: list[Box], chunk_bytes: int) -> None:
    store, box = CountingStore(), wanted[0]
    world = await small_chunk_view(store, {"t": (noise(shape, "float32"), "float32", stored)}, ranks=2, chunk_bytes=chunk_bytes)
    needed = {
        (f"{world.checkpoint.prefix}/{world.indexes[part.rank].objects[chunk.object].name}", chunk.offset)
        for part in world.tensors["t"].parts
        for start, chunk in chunk_starts(part.entry)
        for run in sub_boxes(part.entry.box, start // 4, (start + chunk.raw) // 4)
        if intersect(run, box)
    }
    count = 0

    def add(nbytes: int) -> None:
        nonlocal count
        count += nbytes

    assert await read_boxes(store, world, [BoxRequest("t", box, None)], LoadConfig(block_bytes=1), add) == []
    assert {(key, part.start) for key, part in store.reads} == needed
    assert len(store.reads) == len(needed)
    assert count == sum(len(part) for _, part in store.reads)


ROWS, COLUMNS = 2048, 4096
"""bf16: 16 MiB, four chunks of the default size."""


def by_rows(ranks: int) -> list[Box]:
    """As FSDP2 cuts, or the slices of replicas."""
    cuts = [ROWS * rank // ranks for rank in range(ranks + 1)]
    return [Box((cuts[rank], 0), (cuts[rank + 1] - cuts[rank], COLUMNS)) for rank in range(ranks)]


def by_columns(ranks: int) -> list[Box]:
    """As tensor parallelism cuts the weights that it reduces over."""
    step = COLUMNS // ranks
    return [Box((0, step * rank), (ROWS, step)) for rank in range(ranks)]


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
async def test_bytes_read_over_bytes_needed_by_the_ranks_of_another_layout(
    saves: list[Box], loads: list[Box], bound: float
) -> None:
    store = await saved({"w": (noise((ROWS, COLUMNS), "bfloat16"), "bfloat16", saves)}, len(saves))
    read = 0
    for box in loads:
        world = await world_of(store)
        assert await read_boxes(store, world, [BoxRequest("w", box, lambda *_: None)], LoadConfig()) == []
        read += sum(len(part) for _, part in store.reads)
    needed = sum(box.numel() * 2 for box in loads)
    assert needed <= read < bound * needed


# --- whose tensor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("want", "error", "words"),
    [
        (BoxRequest("nothing", whole((4,)), None), NotFoundError, "holds no tensor nothing$"),
        (BoxRequest("model.weight", whole((64, 48)), None), NotFoundError, "holds no tensor model.weight$"),
        (BoxRequest("t", whole((4,)), None, 1), NotFoundError, "holds no tensor t of rank 1"),
        (BoxRequest("model.weight", whole((64, 48)), None, 7), NotFoundError, "holds no tensor model.weight of rank 7"),
        (BoxRequest("t", Box((1,), (4,)), None), FormatError, "does not lie inside shape"),
        (BoxRequest("t", whole((2, 2)), None), FormatError, "does not lie inside shape"),
    ],
)
async def test_what_is_not_there_cannot_be_wanted(want: BoxRequest, error: type[Exception], words: str) -> None:
    store = MemoryStore()
    tensor = noise((4,), "float32")
    await save_checkpoint(store, pieces=lambda rank: [Piece.part("t", tensor, Box((2 * rank,), (2,)), "float32")])
    with pytest.raises(error, match=words):
        await read_boxes(store, await world_of(store), [want], CONFIG)


# --- damage ------------------------------------------------------------------------------------------------------------


async def test_read_1_the_damage_of_a_failed_read_names_every_tensor_that_it_may_have_touched(tmp_path: Path) -> None:
    """Large chunks are read straight into their places, so an object that is too short has filled some of them."""
    tensors = {fqn: np.full((20 << 10,), number + 1, np.uint8) for number, fqn in enumerate("abc")}
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, world_size=1, tensors=lambda _: tensors, chunk_bytes=32 << 10)
        view = await read_view(store, await root_view.find(store, "global_step1"), LoadConfig())
        [path] = objects(tmp_path, ".chunks")
        os.truncate(path, path.stat().st_size - 1)
        filled = {fqn: np.zeros((20 << 10,), np.uint8) for fqn in tensors}
        wants = [BoxRequest(fqn, (box := whole(data.shape)), BoxMemory(box, data), rank=0) for fqn, data in filled.items()]
        [damage] = await read_boxes(store, view, wants, LoadConfig())
    touched = {fqn for fqn, data in filled.items() if data.any()}
    assert len(touched) > 1
    assert "(rank 0, a, b, c)" in str(damage)


async def test_view_2_a_box_that_nobody_stored_whole_is_named_and_not_read() -> None:
    """Such a checkpoint is never committed; a reader looks all the same."""
    tensor = noise((6, 4), "float32")
    store = await saved({"t": (tensor, "float32", [Box((row, 0), (2, 4)) for row in (0, 2, 4)])}, 3)
    world = await world_of(store)
    torn = CheckpointView(world.checkpoint, {rank: world.indexes[rank] for rank in (0, 2)})
    wants = [BoxRequest("t", whole((6, 4)), None), BoxRequest("t", Box((4, 1), (2, 2)), None)]
    [gap] = await read_boxes(store, torn, wants, CONFIG)
    assert isinstance(gap, FormatError)
    assert gap.fqn == "t"
    assert str(gap) == "t cannot be put together from the boxes of ranks [0, 2]: 8 of 24 elements are written by no rank"
    assert len(store.reads) == 1


async def test_ranks_that_describe_a_tensor_differently_are_refused_by_name() -> None:
    one = await world_of(await saved({"t": (noise((4,), "float32"), "float32", [whole((4,))])}, 1))
    two = await world_of(await saved({"t": (noise((4,), "int32"), "int32", [whole((4,))])}, 1))
    with pytest.raises(FormatError, match=r"^t is float32\[4\] on rank 0 and int32\[4\] on rank 5$") as caught:
        global_tensors({0: one.indexes[0], 5: two.indexes[0]})
    assert (caught.value.fqn, caught.value.rank) == ("t", 5)


async def test_a_sink_is_given_a_view_and_no_copy_of_what_is_raw() -> None:
    """What is stored raw and wanted whole goes from the read buffer into the sink."""
    tensor, bases = noise((4, 8), "float32"), []
    store = await saved({"t": (tensor, "float32", [whole((4, 8))])}, 1)

    def sink(box: Box, elements: NDArray[Any]) -> None:
        bases.append(elements.base is not None and not elements.flags.owndata)

    take: BoxSink = sink
    assert await read_boxes(store, await world_of(store), [BoxRequest("t", Box((1, 2), (2, 3)), take)], CONFIG) == []
    assert bases
    assert all(bases)
