"""Plans: what the ranks say they write must be the whole state, and an index must be what its plan says."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.layout.boxes import Box, boxes_of_range, tiling_fault, whole
from checkpointd.layout.indexes import Plan, PlanTensor
from checkpointd.layout.plan import (
    Doubled,
    NumberedPlan,
    PlanComparison,
    TensorNumbers,
    _is_grid,
    compared,
)
from tests.box_strategies import boxes_in, shapes, tilings_of


def plan(rank: int, *tensors: PlanTensor, world_size: int = 2) -> Plan:
    return Plan(rank=rank, world_size=world_size, tensors=tensors)


def part(fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...], shape: tuple[int, ...] = (4, 4)) -> PlanTensor:
    return PlanTensor(fqn, "float32", shape, Box(offsets, sizes), "global")


def own(fqn: str, *sizes: int) -> PlanTensor:
    return PlanTensor(fqn, "float32", sizes, whole(sizes), "rank")


TOP, BOTTOM = part("w", (0, 0), (2, 4)), part("w", (2, 0), (2, 4))


def union_fault(plans: dict[int, Plan]) -> str | None:
    names = TensorNumbers()
    return compared({rank: NumberedPlan.of(one, names) for rank, one in plans.items()}, names).fault


def test_each_rank_has_its_own_tensors_whatever_the_others_call_theirs() -> None:
    assert union_fault({0: plan(0, own("rng", 16)), 1: plan(1, own("rng", 624), own("more", 1))}) is None


def test_a_gap_names_the_tensor_and_the_ranks_that_have_the_rest() -> None:
    assert union_fault({0: plan(0, TOP)}) == "w (ranks [0]): 8 of 16 elements are written by no rank"
    short = part("w", (2, 0), (2, 3))
    assert union_fault({0: plan(0, TOP), 3: plan(3, short)}) == "w (ranks [0, 3]): 2 of 16 elements are written by no rank"


def test_an_overlap_names_the_tensor_the_ranks_and_the_boxes() -> None:
    fault = union_fault({0: plan(0, TOP), 1: plan(1, part("w", (1, 0), (3, 4)))})
    assert fault == "w (ranks [0, 1]): boxes (0, 0)+(2, 4) and (1, 0)+(3, 4) overlap"


def comparison(*plans: Plan) -> PlanComparison:
    names = TensorNumbers()
    return compared({one.rank: NumberedPlan.of(one, names) for one in plans}, names)


def test_a_box_that_several_ranks_list_must_be_equal_and_counts_once() -> None:
    once = comparison(plan(0, TOP), plan(1, BOTTOM))
    assert once == PlanComparison()
    twice = comparison(plan(0, TOP, own("rng", 2)), plan(1, BOTTOM), plan(2, TOP), plan(3, part("w", (0, 0), (0, 0))))
    assert twice == PlanComparison(doubled=(Doubled("w", (0, 2)),))


@pytest.mark.parametrize("rest", [part("w", (2, 0), (1, 4)), part("w", (1, 0), (3, 4))])
def test_what_is_doubled_hides_no_other_fault(rest: PlanTensor) -> None:
    found = comparison(plan(0, TOP), plan(1, TOP), plan(2, rest))
    assert found.fault is not None
    assert found.fault.startswith("w (ranks [0, 1, 2]): ")
    assert not found.doubled


def test_a_rank_must_cover_its_own_tensor_alone() -> None:
    half = PlanTensor("w", "float32", (4,), Box((0,), (2,)), "rank")
    rest = PlanTensor("w", "float32", (4,), Box((2,), (2,)), "rank")
    assert union_fault({0: plan(0, half, rest)}) is None
    assert union_fault({0: plan(0, half), 1: plan(1, rest)}) == "w (ranks [0]): 2 of 4 elements are written by no rank"


@pytest.mark.parametrize(("dtype", "shape"), [("bfloat16", (4, 4)), ("float32", (4, 8))])
def test_ranks_that_describe_a_tensor_differently_are_both_named(dtype: str, shape: tuple[int, ...]) -> None:
    other = msgspec.structs.replace(BOTTOM, dtype=dtype, shape=shape)
    fault = union_fault({4: plan(4, TOP), 5: plan(5, other)})
    assert fault == f"w is float32[4, 4] on rank 4 and {dtype}{list(shape)} on rank 5"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple), st.integers(1, 7), st.data())
def test_a_flat_partition_over_any_number_of_ranks_is_whole_until_one_is_missing(
    shape: tuple[int, ...], world_size: int, data: st.DataObject
) -> None:
    total = math.prod(shape)
    cuts = [0, *sorted(data.draw(st.integers(0, total)) for _ in range(world_size - 1)), total]
    plans = {
        rank: plan(rank, *(part("w", b.offsets, b.sizes, shape) for b in boxes_of_range(shape, cuts[rank], cuts[rank + 1])))
        for rank in range(world_size)
    }
    assert union_fault(plans) is None
    lost = data.draw(st.integers(0, world_size - 1))
    count = cuts[lost + 1] - cuts[lost]
    rest = {rank: found for rank, found in plans.items() if rank != lost}
    fault = union_fault(rest)
    if count and any(p.tensors for p in rest.values()):
        assert fault is not None
        assert f"{count} of {total} elements are written by no rank" in fault
    else:
        assert fault is None


@pytest.mark.nightly
@pytest.mark.parametrize("dim", [0, 1])
def test_a_thousand_ranks_with_hundreds_of_tensors_each(dim: int) -> None:
    """204,800 boxes, cut along rows or along columns: to compare each tensor's with all others would take 100 million pairs."""
    ranks, tensors = 1024, 200
    shape = (ranks, 8) if dim == 0 else (8, ranks)
    sizes = (1, 8) if dim == 0 else (8, 1)

    def at(rank: int) -> tuple[int, int]:
        return (rank, 0) if dim == 0 else (0, rank)

    plans = {
        rank: plan(rank, *(part(f"layer{n}", at(rank), sizes, shape) for n in range(tensors)), world_size=ranks)
        for rank in range(ranks)
    }
    assert union_fault(plans) is None
    plans[700] = plan(700, *plans[700].tensors[:-1], world_size=ranks)
    fault = union_fault(plans)
    assert fault is not None
    assert fault.endswith("8 of 8192 elements are written by no rank")
    assert fault.startswith("layer199 (ranks [0, 1, ")


@given(shapes.filter(math.prod), st.data())
def test_boxes_compared_as_arrays_give_what_they_give_one_by_one(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Tilings, and what is left of them where one box is another one: the quick way passes none that has a fault."""
    boxes = data.draw(tilings_of(shape))
    if boxes and data.draw(st.booleans()):
        boxes[data.draw(st.integers(0, len(boxes) - 1))] = data.draw(boxes_in(shape))
    places = np.array([(*box.offsets, *box.sizes) for box in boxes], np.int64).reshape(len(boxes), 2 * len(shape))
    if _is_grid(shape, places):
        assert tiling_fault(shape, boxes) is None


@pytest.mark.parametrize("cuts", [(5, 1), (1, 5), (5, 7)])
@pytest.mark.parametrize("bad", ["outside", "before", "twice", "wide", "gone"])
def test_a_grid_is_told_from_what_is_nearly_one(cuts: tuple[int, int], bad: str) -> None:
    shape = (11, 13)
    rows, columns = ([n * i // cut for i in range(cut + 1)] for n, cut in zip(shape, cuts, strict=True))
    cells = [(a, c, b - a, d - c) for a, b in pairwise(rows) for c, d in pairwise(columns)]
    assert _is_grid(shape, np.array([*cells, (0, 0, 0, 13)]))
    a, c, height, width = cells[-1]
    changed = {
        "outside": [(a, c + 1, height, width)],
        "before": [(a - 1, c, height, width)],
        "twice": [cells[0]],
        "wide": [(a, c - 1, height, width + 1)],
        "gone": [],
    }[bad]
    assert not _is_grid(shape, np.array(cells[:-1] + changed))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"box": Box((1 << 64, 0), (1, 1))}, "does not lie inside shape (4, 4)"),
        ({"box": Box((0, 0), (1 << 64, 4)), "shape": (1 << 64, 4)}, "no tensor has the shape [18446744073709551616, 4]"),
        ({"box": Box((0,), (4,))}, "box (0,)+(4,) does not lie inside shape (4, 4)"),
    ],
)
def test_numbers_that_no_tensor_has_are_a_fault_and_no_surprise(changes: dict[str, Any], words: str) -> None:
    fault = union_fault({0: plan(0, TOP), 1: plan(1, msgspec.structs.replace(BOTTOM, **changes))})
    assert fault is not None
    assert fault.startswith("w (ranks [1]): ")
    assert words in fault
