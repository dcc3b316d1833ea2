"""Boxes against numpy: a box is a set of elements, and counting them one by one is the oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import FormatError
from checkpointd.layout.boxes import NDIM_MAX, Box, boxes_of_range, intersect, tiling_fault, whole
from tests.box_strategies import Shape, boxes_in, shapes, tilings_of


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Shape, Box, Box]:
    shape = draw(shapes)
    return shape, draw(boxes_in(shape)), draw(boxes_in(shape))


@st.composite
def ranges(draw: st.DrawFn) -> tuple[Shape, int, int]:
    shape = draw(shapes)
    start, stop = sorted(draw(st.lists(st.integers(0, math.prod(shape)), min_size=2, max_size=2)))
    return shape, start, stop


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Box]]:
    """Boxes that tile a shape, then perhaps spoilt: one left out, doubled, or another one beside them."""
    shape = draw(shapes)
    boxes = draw(tilings_of(shape))
    spoilt = draw(st.sampled_from(["", "", "drop", "double", "other"]))
    if spoilt == "drop":
        boxes.pop()
    elif spoilt:
        boxes.append(boxes[0] if spoilt == "double" else draw(boxes_in(shape)))
    return shape, boxes


def elements(shape: Shape, box: Box) -> list[int]:
    """The row-major numbers of the elements of `shape` that lie in `box`, in the box's own order."""
    index = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return list(np.arange(math.prod(shape)).reshape(shape)[index].reshape(-1))


def writes(shape: Shape, boxes: list[Box]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How often each element is written."""
    found = np.zeros(math.prod(shape), dtype=np.int64)
    for box in boxes:
        found[elements(shape, box)] += 1
    return found


@given(ranges())
def test_a_range_becomes_few_boxes_that_cover_it_in_order(case: tuple[Shape, int, int]) -> None:
    shape, start, stop = case
    boxes = boxes_of_range(shape, start, stop)
    assert [number for box in boxes for number in elements(shape, box)] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        box.check(shape)


def test_a_range_of_a_huge_tensor_costs_nothing() -> None:
    shape = (1 << 20, 1 << 20, 1 << 20)
    boxes = boxes_of_range(shape, 1, math.prod(shape) - 1)
    assert len(boxes) == 5
    assert (
        tiling_fault(shape, [*boxes, Box((0, 0, 0), (1, 1, 1))]) == "1 of 1152921504606846976 elements are written by no rank"
    )


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_the_tensor_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match="does not lie inside 12 elements"):
        boxes_of_range((3, 4), start, stop)


@given(pairs())
def test_the_intersection_has_just_the_common_elements(case: tuple[Shape, Box, Box]) -> None:
    shape, a, b = case
    common = sorted(set(elements(shape, a)) & set(elements(shape, b)))
    found = intersect(a, b)
    assert (sorted(elements(shape, found)) if found else []) == common
    assert intersect(b, a) == found
    if found is None and shape:
        assert not common
    if found is not None:
        assert found.numel() == len(common)


@given(tilings())
def test_a_tiling_is_one_exactly_where_every_element_is_written_once(case: tuple[Shape, list[Box]]) -> None:
    shape, boxes = case
    counts = writes(shape, boxes)
    fault = tiling_fault(shape, boxes)
    assert (fault is None) == bool((counts == 1).all())
    if fault is not None:
        missing = int((counts == 0).sum())
        assert ("overlap" in fault or "times" in fault) if counts.max() > 1 else fault.startswith(f"{missing} of {counts.size}")


@given(shapes, st.data())
def test_any_boxes_are_judged_as_the_count_of_writes_does(shape: Shape, data: st.DataObject) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=5))
    assert (tiling_fault(shape, boxes) is None) == bool((writes(shape, boxes) == 1).all())


def test_tensors_of_one_element_and_of_none() -> None:
    assert tiling_fault((), [whole(())]) is None
    assert tiling_fault((), []) == "1 of 1 elements are written by no rank"
    assert tiling_fault((), [whole(()), whole(())]) == "the one element is written 2 times"
    assert tiling_fault((0, 3), []) is None
    assert tiling_fault((0, 3), [whole((0, 3)), whole((0, 3))]) is None
    assert boxes_of_range((), 0, 1) == [whole(())]
    assert boxes_of_range((0, 3), 0, 0) == []
    assert intersect(whole(()), whole(())) == whole(())


@pytest.mark.parametrize(
    "box",
    [
        Box((0, 0), (3, 5)),
        Box((1, 0), (3, 4)),
        Box((-1, 0), (2, 4)),
        Box((4, 0), (-1, 4)),
        Box((0,), (3,)),
        Box((0, 0, 0), (3, 4, 1)),
        Box((0, 0), (3,)),
        Box((1 << 70, 0), (1, 1)),
    ],
)
def test_a_box_outside_its_tensor_is_refused(box: Box) -> None:
    with pytest.raises(FormatError, match="does not lie inside shape"):
        box.check((3, 4))
    fault = tiling_fault((3, 4), [whole((3, 4)), box])
    assert fault is not None
    assert "does not lie inside shape" in fault


def test_more_dimensions_than_any_tensor_has_are_refused_before_they_are_multiplied() -> None:
    shape = (1 << 62,) * (NDIM_MAX + 1)
    assert tiling_fault(shape, [whole(shape)]) == f"a tensor cannot have {NDIM_MAX + 1} dimensions: {NDIM_MAX} are the limit"
    assert tiling_fault((1,) * NDIM_MAX, [whole((1,) * NDIM_MAX)]) is None
