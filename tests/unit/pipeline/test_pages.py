"""Runs of pages against an oracle: the buffer as numbered bytes, written run by run into an object."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.layout.boxes import whole
from checkpointd.pipeline.pages import locate, page_buffer, page_up, runs_of
from checkpointd.pipeline.shard import PAGE, TENSOR_ALIGNMENT, ShardTensor


def tensor(offset: int, nbytes: int) -> ShardTensor:
    return ShardTensor(f"t{offset}", "uint8", (nbytes,), whole((nbytes,)), "rank", offset, nbytes, 1)


@st.composite
def shards(draw: st.DrawFn) -> list[ShardTensor]:
    """Tensors at 64-byte offsets one after another, some empty, with gaps of any size; some are left out, order shuffled."""
    found, offset = [], 0
    for _ in range(draw(st.integers(0, 12))):
        offset += TENSOR_ALIGNMENT * draw(st.sampled_from([0, 0, 0, 1, 63, 64, 65, 200]))
        nbytes = draw(st.integers(0, 200) | st.integers(0, 5 * PAGE))
        found.append(tensor(offset, nbytes))
        offset += -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT
    return [t for t in draw(st.permutations(found)) if draw(st.booleans())]


@given(shards())
def test_runs_are_whole_pages_apart_from_each_other_and_back_to_back_in_the_object(tensors: list[ShardTensor]) -> None:
    runs = runs_of(tensors)
    base, end = 0, -1
    for run in runs:
        assert run.start % PAGE == run.stop % PAGE == 0
        assert end < run.start < run.stop
        assert run.base == base
        base, end = base + run.stop - run.start, run.stop


@given(shards())
def test_every_byte_of_every_tensor_lies_where_locate_says(tensors: list[ShardTensor]) -> None:
    runs = runs_of(tensors)
    buffer = np.arange(max((run.stop for run in runs), default=0))
    stored = np.concatenate([buffer[:0], *(buffer[run.start : run.stop] for run in runs)])
    for t in tensors:
        if t.nbytes:
            at = locate(runs, t.offset)
            assert (stored[at : at + t.nbytes] == np.arange(t.offset, t.offset + t.nbytes)).all()
            assert locate(runs, t.offset + t.nbytes - 1) == at + t.nbytes - 1


@given(shards())
def test_only_pages_that_hold_something_are_stored(tensors: list[ShardTensor]) -> None:
    wanted = {page for t in tensors if t.nbytes for page in range(t.offset // PAGE, page_up(t.offset + t.nbytes) // PAGE)}
    assert {page for run in runs_of(tensors) for page in range(run.start // PAGE, run.stop // PAGE)} == wanted


@given(st.integers(0, 1 << 40))
def test_page_up_is_the_next_whole_page(size: int) -> None:
    assert page_up(size) % PAGE == 0
    assert size <= page_up(size) < size + PAGE


def test_a_page_buffer_is_aligned_zeroed_and_of_its_size() -> None:
    for size in (0, 1, PAGE, 3 * PAGE + 5):
        buffer = page_buffer(size)
        assert buffer.nbytes == size
        assert buffer.__array_interface__["data"][0] % PAGE == 0
        assert not buffer.any()
        buffer[:] = 1
