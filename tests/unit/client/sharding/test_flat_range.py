"""Flat ranges of tensors as boxes (FLAT-1, FLAT-2 of flat_range.py), on ranks that are simulated one after the other."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.errors import MismatchError
from checkpointd.layout.boxes import Box, tiling_fault, whole
from checkpointd.layout.indexes import PlanTensor
from checkpointd_client.capture.state import Captured, capture
from checkpointd_client.restore.content import RankContent
from checkpointd_client.restore.plan import LoadOptions, Restoration, prepare
from checkpointd_client.restore.target_chooser import Described, LoadTargets, StoredTensor
from checkpointd_client.sharding.dtensor import ReplicaGroup
from checkpointd_client.sharding.flat_range import LocalShardTensor, MultiTarget, flat, same
from tests.unit.client import capture_and_fill
from tests.unit.layout.test_plan import plan, union_fault

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(math.prod(shape)).to(dtype).view(shape)


def cut(full: torch.Tensor, ranks: int, *, by_columns: bool = False) -> list[LocalShardTensor]:
    """As ZeRO 3 does: equal parts, padded, and what pads them left out."""
    size = -(-full.numel() // ranks)
    starts = [min(rank * size, full.numel()) for rank in range(ranks)]
    flattened = (full.t() if by_columns else full).reshape(-1)
    parts = [flattened[start : start + size].clone() for start in starts]
    return [flat(tuple(full.shape), start, part, by_columns=by_columns) for start, part in zip(starts, parts, strict=True)]


def captured(states: list[dict[str, Any]]) -> list[Captured]:
    return [capture(state, None, exclude_frozen_parameters=False) for state in states]


def fault_of(ranks: list[Captured]) -> str | None:
    """What the coordinator says of what the ranks write."""
    plans = {}
    for rank, one in enumerate(ranks):
        parts = []
        for leaf in one.leaves:
            shape, box = (leaf.part.shape, leaf.part.box) if leaf.part else (tuple(leaf.tensor.shape), None)
            parts.append(PlanTensor(leaf.fqn, leaf.dtype, shape, box or whole(shape), "global" if leaf.part else "rank"))
        plans[rank] = plan(rank, *parts, world_size=len(ranks))
    return union_fault(plans)


def content_of(ranks: list[Captured]) -> tuple[RankContent, dict[str, torch.Tensor]]:
    """What a load sees, and every tensor put together from its boxes."""
    made: dict[str, torch.Tensor] = {}
    for leaf in (leaf for one in ranks for leaf in one.leaves):
        shape = leaf.part.shape if leaf.part else tuple(leaf.tensor.shape)
        box: Box = leaf.part.box if leaf.part else whole(shape)
        full = made.setdefault(leaf.fqn, torch.zeros(shape, dtype=leaf.tensor.dtype))
        full[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] = leaf.tensor
    entries = {fqn: (str(full.dtype).removeprefix("torch."), tuple(full.shape)) for fqn, full in made.items()}
    saved = capture_and_fill.write(Captured((), (), ranks[0].tree, ()))
    return RankContent(root=saved.tree, entries=entries, owners={}, aliases=ranks[0].aliases, excluded=()), made


def fill(restoration: Restoration, made: dict[str, torch.Tensor]) -> None:
    for target in restoration.targets:
        for box, view in target.boxes():
            view.copy_(made[target.fqn][tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))])
    restoration.finish()


@given(SHAPES, st.integers(1, 6), st.integers(1, 6))
def test_a_tensor_in_flat_ranges_of_n_ranks_loads_into_those_of_m(shape: tuple[int, ...], n: int, m: int) -> None:
    full = numbered(shape)
    ranks = captured([{"w": part} for part in cut(full, n)])
    assert fault_of(ranks) is None
    content, made = content_of(ranks)
    assert made["w"].equal(full)
    targets = cut(torch.zeros(shape), m)
    for target in targets:
        fill(prepare({"w": target}, content, LoadOptions()), made)
    assert torch.cat([target.tensor.reshape(-1) for target in targets]).equal(full.reshape(-1))


@given(st.tuples(st.integers(1, 5), st.integers(1, 5)), st.integers(1, 6), st.integers(1, 6), st.booleans(), st.booleans())
def test_a_matrix_by_columns_has_the_same_elements(shape: tuple[int, int], n: int, m: int, saved: bool, loaded: bool) -> None:
    full = numbered(shape)
    ranks = captured([{"w": part} for part in cut(full, n, by_columns=saved)])
    assert fault_of(ranks) is None
    content, made = content_of(ranks)
    assert made["w"].equal(full)
    memory = torch.zeros(full.numel())
    size = -(-full.numel() // m)
    for start in range(0, full.numel(), size):
        target = flat(shape, start, memory[start : start + size], by_columns=loaded)
        fill(prepare({"w": target}, content, LoadOptions()), made)
    assert memory.equal((full.t() if loaded else full).reshape(-1))


@given(SHAPES.filter(bool), st.integers(1, 6))
def test_a_range_is_few_boxes(shape: tuple[int, ...], n: int) -> None:
    for part in cut(numbered(shape), n):
        assert len(part.held.parts) <= 2 * len(shape) - 1
    boxes = [part.box for held in cut(numbered(shape), n) for part in held.held.parts]
    assert tiling_fault(shape, boxes) is None


def test_one_held_tensor_under_two_names_is_stored_once_also_by_ranks_that_hold_nothing_of_it() -> None:
    parts = cut(numbered((2, 1)), 4)
    ranks = captured([{"one": part, "two": part} for part in parts])
    assert parts[3].tensor.numel() == 0
    assert fault_of(ranks) is None
    for one in ranks:
        assert [(alias.fqn, alias.owner) for alias in one.aliases] == [("two", "one")]
        assert {leaf.fqn for leaf in one.leaves} == {"one"}


def test_a_range_that_is_missing_is_found() -> None:
    ranks = captured([{"w": part} for part in cut(numbered((3, 5)), 3)][:2])
    assert "5 of 15 elements" in str(fault_of(ranks))


def test_of_copies_each_element_is_written_once() -> None:
    full = numbered((300, 100))
    ranks = captured([{"w": same(full, ReplicaGroup(rank, 3), optimizer_only=True)} for rank in range(3)])
    assert fault_of(ranks) is None
    assert {leaf.optimizer_only for one in ranks for leaf in one.leaves} == {True}
    assert max(leaf.tensor.numel() for one in ranks for leaf in one.leaves) == full.numel() // 3


def test_several_places_are_filled_from_one_tensor_each_in_its_own_dtype() -> None:
    full = torch.tensor([1.0, 1 + 2**-20, 3.0])
    content, made = content_of(captured([{"w": same(full, ReplicaGroup(0, 1))}]))
    low = same(torch.zeros(3, dtype=torch.bfloat16), ReplicaGroup(0, 1))
    high = flat((3,), 1, torch.zeros(2))
    fill(prepare({"w": MultiTarget((low, high))}, content, LoadOptions(cast=True)), made)
    assert low.tensor.equal(full.bfloat16())
    assert high.tensor.equal(full[1:])


def test_another_shape_does_not_fit() -> None:
    content, _ = content_of(captured([{"w": flat((4, 2), 0, torch.zeros(8))}]))
    with pytest.raises(MismatchError, match=r"w: shape \(4, 2\) is stored, and \(2, 4\) is there now"):
        prepare({"w": flat((2, 4), 0, torch.zeros(3))}, content, LoadOptions())


def test_a_flat_range_has_one_dimension() -> None:
    with pytest.raises(ValueError, match="one dimension"):
        flat((2, 2), 0, torch.zeros(1, 2))
    with pytest.raises(ValueError, match="does not lie inside"):
        flat((2, 2), 3, torch.zeros(2))


class Choosing:
    """Takes what it knows, and says what it does not like."""

    def __init__(self, faults: list[str]) -> None:
        self.faults, self.seen = faults, [dict[Any, Any]()]
        self.target = flat((2, 3), 2, torch.zeros(3))

    def places(self, stored: Described) -> LoadTargets:
        self.seen.append(dict(stored))
        return LoadTargets({"w": self.target, "rest": None}, self.faults)


def test_places_are_chosen_by_what_is_stored() -> None:
    state = {"w": flat((2, 3), 0, numbered((6,))), "rest": {"n": 1, "list": [2, {"t": torch.ones(2)}]}, "more": 5}
    content, made = content_of(captured([state]))
    chooser = Choosing([])
    restoration = prepare(chooser, content, LoadOptions())
    assert chooser.seen[1] == {
        "w": StoredTensor("float32", (2, 3)),
        "rest": {"n": 1, "list": [2, {"t": StoredTensor("float32", (2,))}]},
        "more": 5,
    }
    assert restoration.unexpected == ()
    fill(restoration, made)
    assert chooser.target.tensor.tolist() == [2, 3, 4]
    with pytest.raises(MismatchError, match="I do not like it"):
        prepare(Choosing(["w: I do not like it"]), content, LoadOptions())
