"""Regions against numpy: which elements a run of a box holds is counted one by one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.regions import regions, relative, slices, span, sub_boxes, touches
from tests.box_strategies import Shape, boxes_in, shapes

Case = tuple[Shape, Box, int, int, Box]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape, a box in it, a run of that box, and a box that is wanted."""
    shape = draw(shapes)
    box = draw(boxes_in(shape))
    start, stop = sorted(draw(st.lists(st.integers(0, box.numel()), min_size=2, max_size=2)))
    return shape, box, start, stop, draw(boxes_in(shape))


def numbered(shape: Shape) -> NDArray[Any]:
    """A tensor whose elements are their own row-major numbers."""
    return np.arange(math.prod(shape)).reshape(shape)


def elements(shape: Shape, box: Box) -> list[int]:
    """The numbers of the elements in `box`, in the box's own order."""
    return list(numbered(shape)[slices(whole(shape), box)].reshape(-1))


@given(cases())
def test_a_run_is_its_sub_boxes_in_order(case: Case) -> None:
    shape, box, start, stop, _ = case
    found = [n for part in sub_boxes(box, start, stop) for n in elements(shape, part)]
    assert found == elements(shape, box)[start:stop]
    assert len(sub_boxes(box, start, stop)) <= max(1, 2 * len(shape) - 1)


@given(cases())
def test_regions_are_what_is_wanted_of_a_run_each_element_once(case: Case) -> None:
    shape, box, start, stop, wanted = case
    found = [n for region in regions(box, start, stop, wanted) for n in elements(shape, region.box)]
    assert sorted(found) == sorted(set(elements(shape, box)[start:stop]) & set(elements(shape, wanted)))


@given(cases())
def test_a_region_takes_the_elements_of_its_box_out_of_the_run(case: Case) -> None:
    shape, box, start, stop, wanted = case
    run = np.array(elements(shape, box)[start:stop])
    for region in regions(box, start, stop, wanted):
        taken = region.of(run)
        assert taken.shape == region.box.sizes
        assert np.shares_memory(taken, run)
        assert list(taken.reshape(-1)) == elements(shape, region.box)


@given(cases())
def test_a_run_touches_a_box_where_it_has_a_region_of_it(case: Case) -> None:
    shape, box, start, stop, wanted = case
    shared = set(elements(shape, box)[start:stop]) & set(elements(shape, wanted))
    assert touches(box, start, stop, wanted) == bool(shared)


@given(cases())
def test_the_span_reaches_from_the_first_wanted_element_to_the_last(case: Case) -> None:
    shape, box, _, _, wanted = case
    places = [at for at, n in enumerate(elements(shape, box)) if n in set(elements(shape, wanted))]
    assert span(box, wanted) == (range(places[0], places[-1] + 1) if places else range(0))


def test_boxes_are_seen_from_a_frame() -> None:
    assert relative([Box((3, 5), (1, 2))], Box((2, 5), (4, 4))) == [Box((1, 0), (1, 2))]


def test_boxes_of_other_dimensions_do_not_meet() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(regions(whole((4,)), 0, 4, whole((4, 1))))
