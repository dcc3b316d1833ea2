"""Layouts from the socket: what is taken comes back the same, and nothing may lie outside its slot or over another tensor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.daemon.memory.layouts import shard_tensors, wire_tensors
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.wire import WireTensor
from checkpointd.errors import UsageError
from checkpointd.layout.boxes import Box, whole
from tests.builders import make_shard, rank_arrays


def tensor(fqn: str = "w", offset: int = 0, shape: tuple[int, ...] = (16,), dtype: str = "float32") -> WireTensor:
    return WireTensor(fqn, dtype, shape, whole(shape), "rank", offset)


def layout(*tensors: WireTensor, nbytes: int = 4096) -> wire.Layout:
    return wire.Layout(layout=0, nbytes=nbytes, tensors=tensors)


def test_a_layout_goes_over_the_socket_and_comes_back() -> None:
    shard = make_shard(rank_arrays(0))
    sent = layout(*wire_tensors(shard.tensors), nbytes=len(shard.buffer))
    assert shard_tensors(sent) == shard.tensors


def test_boxes_scopes_and_empty_tensors() -> None:
    part = WireTensor("a", "bfloat16", (8, 8), Box((2, 0), (3, 8)), "global", 0)
    none = tensor("b", 64, (0, 4))
    found = shard_tensors(layout(part, none))
    assert [(t.nbytes, t.itemsize, t.scope) for t in found] == [(48, 2, "global"), (0, 4, "rank")]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (layout(tensor(shape=(1025,))), "end at byte 4100 of a layout of 4096"),
        (layout(tensor(offset=4096)), "end at byte 4160 of a layout of 4096"),
        (layout(tensor("a"), tensor("b", 0)), "overlaps the tensor before it"),
        (layout(tensor("a"), tensor("b", 63)), "overlaps the tensor before it, or its offset 63 is not a multiple of 64"),
        (layout(tensor("a", 64), tensor("b", 0)), "overlaps the tensor before it"),
        (layout(tensor(offset=-64)), "overlaps the tensor before it"),
        (layout(tensor(offset=32)), "is not a multiple of 64"),
        (layout(tensor("a"), tensor("a", 64)), "one box of a tensor twice"),
        (layout(tensor(dtype="float99")), "float99.*upgrade"),
        (layout(nbytes=0), "whole number of pages"),
        (layout(nbytes=4097), "whole number of pages"),
        (layout(tensor(shape=(-1,))), "does not lie inside"),
        (layout(tensor(shape=(1 << 62, 1 << 62))), "end at byte"),
        (layout(tensor(shape=(0,) * 2000)), "2000 dimensions"),
        (layout(WireTensor("w", "int8", (4,), Box((1,), (4,)), "rank", 0)), "does not lie inside"),
        (layout(WireTensor("w", "int8", (4,), Box((-1,), (2,)), "rank", 0)), "does not lie inside"),
        (layout(WireTensor("w", "int8", (4,), Box((0, 0), (1, 1)), "rank", 0)), "does not lie inside"),
        (layout(tensor(shape=(1 << 62,), offset=1 << 63)), "end at byte"),
    ],
)
def test_what_cannot_be_is_refused(bad: wire.Layout, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        shard_tensors(bad)


@given(st.lists(st.tuples(st.integers(-200, 5000), st.integers(0, 600)), max_size=6))
def test_what_is_taken_never_overlaps_nor_leaves_its_slot(places: list[tuple[int, int]]) -> None:
    parts = [tensor(str(i), offset, (size,), "uint8") for i, (offset, size) in enumerate(places)]
    try:
        found = shard_tensors(layout(*parts))
    except UsageError:
        return
    taken: set[int] = set()
    for one in found:
        bytes_of = set(range(one.offset, one.offset + one.nbytes))
        assert not bytes_of & taken
        taken |= bytes_of
    assert not taken - set(range(4096))


def test_the_example_of_overlap_is_one() -> None:
    """The property above would not see a rule that refuses everything."""
    fitting = layout(tensor("a", 0, (64,), "uint8"), tensor("b", 64, (4032,), "uint8"))
    assert len(shard_tensors(fitting)) == 2
    with pytest.raises(UsageError):
        shard_tensors(replace_nbytes(fitting, 65))


def replace_nbytes(one: wire.Layout, size: int) -> wire.Layout:
    return layout(tensor("a", 0, (size,), "uint8"), *one.tensors[1:])
