"""tiles.py: the items of tiles that belong to the part of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.layout.boxes import Box
from checkpointd_client.capture.tensor_kinds.kind import Apart
from checkpointd_client.capture.tensor_kinds.tiles import TILED, common, essence, filled, is_tiled, items_held, items_wanted
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard

INT8 = next(name for name in TILED if name.endswith("Int8Tensor"))


def box(shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> LocalShard:
    return LocalShard(shape, (LocalBox(shape, Box(offsets, sizes), (0,) * len(shape)),))


def shown(held: LocalShard | None) -> Any:
    return None if held is None else (held.shape, held.parts[0].box)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ((4, 6), ((8, 6), Box((4, 0), (4, 6)))),  # elements
        ((4, 1), ((8, 1), Box((4, 0), (4, 1)))),  # a scale for each row
        ((4, 3), ((8, 3), Box((4, 0), (4, 3)))),  # a scale for each group, or two elements a byte
        ((1, 1), ((2, 1), Box((1, 0), (1, 1)))),  # one scale for the part
        ((3, 1), None),
        ((0, 1), None),
        ((4,), None),
    ],
)
def test_the_second_of_two_ranks_has_the_second_half_of_the_items(inner: tuple[int, ...], expected: object) -> None:
    assert shown(items_held(box((8, 6), (4, 0), (4, 6)), ((2,), ()), inner)) == expected


@pytest.mark.parametrize(
    ("size", "ranks", "start", "count", "items", "known"),
    [
        (7, (2,), 0, 4, 4, True),
        (7, (2,), 4, 3, 3, True),
        (7, (2,), 0, 4, 1, False),  # the ranks have one scale each, for 4 rows and for 3
        (5, (4,), 4, 1, 1, False),  # a rank with one row cannot tell whether its scale is for the row or for its part
        (6, (4,), 0, 2, 2, False),  # the last rank has no rows
        (7, (2, 2), 0, 2, 2, False),
    ],
)
def test_uneven_parts_have_known_items_only_if_all_ranks_see_that_each_row_has_one(
    size: int, ranks: tuple[int, ...], start: int, count: int, items: int, *, known: bool
) -> None:
    found = items_held(box((size, 6), (start, 0), (count, 6)), (ranks, ()), (items, 1))
    assert shown(found) == (((size, 1), Box((start, 0), (items, 1))) if known else None)


@pytest.mark.parametrize(
    ("stored", "inner", "expected"),
    [
        ((8, 1), (2, 1), Box((4, 0), (2, 1))),  # rows
        ((2, 1), (1, 1), Box((1, 0), (1, 1))),  # one scale of the saving rank, which had more
        ((8, 1), (1, 1), Box((4, 0), (2, 1))),  # several, which must be equal
        ((2, 1), (2, 1), None),  # this rank keeps a scale for each row
        ((3, 1), (1, 1), None),
        ((8,), (2, 1), None),
    ],
)
def test_the_stored_items_of_a_part(stored: tuple[int, ...], inner: tuple[int, ...], expected: Box | None) -> None:
    found = items_wanted(box((8, 6), (4, 0), (2, 6)), stored, inner)
    assert (None if found is None else found.parts[0].box) == expected


@given(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([0, 1]))
def test_the_ranks_have_all_items_once_and_find_them_again(ranks: int, tile: int, dim: int) -> None:
    """Scales for tiles of rows or of columns."""
    met: list[Box] = []
    for rank in range(ranks):
        size = 24 // ranks
        offsets, sizes = ((rank * size, 0), (size, 24)) if dim == 0 else ((0, rank * size), (24, size))
        inner = (size // tile, 1) if dim == 0 else (1, size // tile)
        held = box((24, 24), offsets, sizes)
        found = items_held(held, ((ranks,), ()) if dim == 0 else ((), (ranks,)), inner)
        again = items_wanted(held, (24 // tile, 1) if dim == 0 else (1, 24 // tile), inner)
        assert found is not None
        assert again is not None
        assert found.parts[0].box == again.parts[0].box
        met.append(found.parts[0].box)
    assert [one.offsets[dim] for one in met] == [rank * (24 // tile // ranks) for rank in range(ranks)]
    assert sum(one.numel() for one in met) == 24 // tile


def test_equal_items_become_one() -> None:
    items = torch.tensor([[1.0], [1.0], [2.0], [2.0]])
    found = common(items, (2, 1))
    assert found is not None
    assert found.tolist() == [[1.0], [2.0]]
    assert common(items, (1, 1)) is None
    assert common(items, (3, 1)) is None
    assert common(items, (4,)) is None
    same = torch.full((4, 2), float("nan"))
    assert common(same, (2, 1)) is not None  # bits are compared


def test_a_tensor_is_filled_from_smaller_tiles_whose_items_are_equal() -> None:
    def apart(scale: torch.Tensor, size: int) -> Apart:
        return Apart({"qdata": torch.ones(4, 2), "scale": scale}, {"block_size": [size, 2], "dtype": torch.float32})

    live = apart(torch.zeros(1, 1), 4)
    assert filled(live, apart(torch.full((2, 1), 3.0), 2))
    assert live.inner["scale"].item() == 3.0
    assert not filled(live, apart(torch.tensor([[4.0], [5.0]]), 2))
    assert live.inner["scale"].item() == 3.0
    other = Apart(live.inner, {"block_size": [4, 2], "dtype": torch.bfloat16})
    assert not filled(live, other)


def test_only_plain_tiles_of_known_classes_count() -> None:
    inner = {"qdata": torch.ones(4, 2), "scale": torch.ones(4, 1)}
    assert is_tiled(INT8, Apart(inner, {"block_size": [1, 2]}))
    assert not is_tiled("mine:Int8Tensor", Apart(inner, {"block_size": [1, 2]}))
    assert not is_tiled(INT8, Apart(inner, {"is_swizzled_scales": True}))
    assert not is_tiled(INT8, Apart(inner | {"act_pre_scale": torch.ones(2)}, {}))
    assert essence({"block_size": [1, 2], "a": 1}) == {"a": 1}
    assert essence({"block_size": 32}) == {"block_size": 32}
    assert essence(None) is None
