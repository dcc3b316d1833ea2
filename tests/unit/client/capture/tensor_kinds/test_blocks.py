"""blocks.py: the items of blocks that belong to the rows of a rank."""

from __future__ import annotations

import pytest

from checkpointd.layout.boxes import Box
from checkpointd_client.capture.tensor_kinds.blocks import BLOCKS, items_held, range_of
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard


def rows(shape: tuple[int, int], start: int, count: int) -> LocalShard:
    box = Box((start, 0), (count, shape[1]))
    return LocalShard(shape, (LocalBox(shape, box, (0, 0)),) if count else ())


def test_rows_are_a_range_and_its_blocks() -> None:
    held = rows((8, 6), 2, 4)
    assert range_of(held) == (12, 36)
    found = items_held(held, 4)
    assert found is not None
    assert (found.shape, [part.box for part in found.parts]) == ((12,), [Box((3,), (6,))])
    nothing = items_held(rows((8, 6), 8, 0), 4)
    assert nothing is not None
    assert (nothing.shape, nothing.parts) == ((12,), ())


@pytest.mark.parametrize("size", [0, 5, 16])
def test_blocks_that_a_rank_holds_in_part_are_no_items(size: int) -> None:
    assert items_held(rows((8, 6), 2, 4), size) is None


def test_columns_are_no_range() -> None:
    part = LocalBox((4, 6), Box((0, 0), (4, 3)), (0, 0))
    assert range_of(LocalShard((4, 6), (part,))) is None


def test_a_context_shows_the_shape_of_its_part() -> None:
    blocks = BLOCKS["torchao.optim.subclass_4bit:OptimState4bit"]
    assert blocks.context([True, (4, 4), "fp32"], (2, 4)) == [True, (2, 4), "fp32"]
    assert blocks.essence([True, (4, 4)]) == [True]
