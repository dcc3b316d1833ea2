"""Any tensor, cut in any way and seen through any view, leaves whole in batches of any size."""

from __future__ import annotations

import asyncio
import math
import os
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec.convert import convert
from checkpointd.config import LoadConfig
from checkpointd.export.selection import Exported, StoredSourceTensor, View, contiguous_stride
from checkpointd.export.stream import PlacedTensor, batches, slabs_of, stream
from checkpointd.layout.boxes import Box
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.pipeline.read.plan import CARRIERS
from checkpointd.store.memory import MemoryStore
from tests.box_strategies import Shape, shapes, tilings_of
from tests.small_chunk_views import small_chunk_view

RANDOM = np.random.default_rng(0)
DTYPES = ("uint8", "bfloat16", "float32", "float64", "complex128")


@st.composite
def views(draw: st.DrawFn, shape: Shape) -> View:
    """All of a tensor, a run of it, or elements scattered over it."""
    count = math.prod(shape)
    kind = draw(st.sampled_from(["whole", "run", "scattered"]))
    if kind == "whole" or not count:
        return View(shape, contiguous_stride(shape), 0)
    start, stop = sorted(draw(st.lists(st.integers(0, count), min_size=2, max_size=2)))
    if kind == "run":
        return View((stop - start,), (1,), start)
    step = draw(st.integers(0, 5))
    rows = draw(st.integers(1, 3))
    reach = count - start - 1
    if reach < 0:
        return View((0,), (1,), count)
    columns = draw(st.integers(1, 1 + (reach // step if step else 3)))
    return View((rows, columns), (0, step), start)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, list[Box], View]:
    shape = draw(shapes)
    return shape, draw(tilings_of(shape)), draw(views(shape))


@given(
    cases(),
    st.sampled_from(DTYPES),
    st.sampled_from([None, "float32", "bfloat16"]),
    st.sampled_from([1, 16, 40, 4096]),
    st.sampled_from([16, 48, 4096]),
)
def test_stream_2_any_tensor_arrives_whole_in_batches_of_any_size(
    case: tuple[Shape, list[Box], View], dtype: str, target: str | None, batch_bytes: int, chunk_bytes: int
) -> None:
    shape, boxes, view = case
    tensor = RANDOM.integers(0, 256, math.prod(shape) * ITEM_BYTES[dtype], dtype=np.uint8)
    elements = tensor.view(CARRIERS[ITEM_BYTES[dtype]]).reshape(shape)
    wanted = target if target and dtype in ("bfloat16", "float32", "float64") else dtype
    strides = [stride * elements.itemsize for stride in view.stride]
    shown = np.lib.stride_tricks.as_strided(elements.reshape(-1)[view.offset :], view.shape, strides)
    expected = convert(np.ascontiguousarray(shown), dtype, wanted).tobytes()

    async def run(path: str) -> dict[str, int]:
        store = MemoryStore()
        world = await small_chunk_view(store, {"t": (elements, dtype, boxes)}, ranks=2, chunk_bytes=chunk_bytes)
        item = PlacedTensor(Exported("x", "t", StoredSourceTensor("t", dtype, shape, None), view), wanted, path, 3)
        return await stream(store, world, [item], LoadConfig(), batch_bytes)

    path = f"/dev/shm/checkpointd-test-{os.getpid()}"
    Path(path).write_bytes(b"abc")
    try:
        assert asyncio.run(run(path)) == {"x": zlib.crc32(expected)}
        assert Path(path).read_bytes() == b"abc" + expected
    finally:
        os.unlink(path)


@given(st.lists(st.integers(0, 50), max_size=6), st.integers(1, 64))
def test_stream_1_batches_are_full_and_no_larger_than_they_may_be(counts: list[int], batch_bytes: int) -> None:
    placed = [
        PlacedTensor(
            Exported(str(n), "t", StoredSourceTensor("t", "float32", (c,), None), View((c,), (1,), 0)), "bfloat16", "p", 0
        )
        for n, c in enumerate(counts)
    ]
    found = list(batches(slabs_of(placed, batch_bytes), batch_bytes))
    for batch in found:
        assert sum(slab.nbytes for slab in batch) <= max(batch_bytes, 2)
    for one, two in pairwise(found):
        assert sum(slab.nbytes for slab in one) + two[0].nbytes > batch_bytes
    slabs = [slab for batch in found for slab in batch]
    for item, count in zip(placed, counts, strict=True):
        runs = [(slab.start, slab.stop) for slab in slabs if slab.placed is item]
        assert [n for start, stop in runs for n in range(start, stop)] == list(range(count))
