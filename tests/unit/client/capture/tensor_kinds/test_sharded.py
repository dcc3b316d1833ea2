"""SHARDEDKIND-1 to SHARDEDKIND-3 of sharded.py: DTensors of wrapper classes, as each rank of a job describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from checkpointd.errors import FormatError, MismatchError
from checkpointd.layout import tree
from checkpointd_client.capture.state import Captured, capture
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from tests.unit.client.capture_and_fill import Saved, bytes_of, write
from tests.unit.client.composite_tensors import OWN, Halves, PerRow, Recipe
from tests.unit.client.simulated_ranks import rank_of

ROWS = torch.arange(16.0).reshape(4, 4) / 3


CLASSES = TensorClasses.of(OWN)


def distributed(cls: type[Halves], rank: int, placements: Sequence[Placement] = (Shard(0),), at: int = 0) -> Any:
    mesh = init_device_mesh("cpu", (2,) * len(placements))
    dim = next((one.dim for one in placements if isinstance(one, Shard)), None)
    plain = (ROWS if dim is None else ROWS.chunk(2, dim)[rank]) + at
    made: Any = DTensor.from_local(plain, mesh, placements, run_check=False, shape=ROWS.shape, stride=ROWS.stride())
    made._local_tensor = cls.of(plain)
    return made


def captured(cls: type[Halves], rank: int, placements: Sequence[Placement] = (Shard(0),)) -> tuple[Captured, tree.Composite]:
    found = capture({"x": distributed(cls, rank, placements)}, None, exclude_frozen_parameters=False, classes=CLASSES)
    assert isinstance(found.tree, tree.Dict)
    node = dict(dict(found.tree.items)["state"].items)["x"]  # type: ignore[index, union-attr]  # the tree of a state
    assert isinstance(node, tree.Composite)
    return found, node


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("dim", [0, 1])
def test_inner_tensors_of_the_shape_of_their_tensor_are_parts_of_whole_ones(rank: int, dim: int) -> None:
    with rank_of(rank, 2):
        found, node = captured(Halves, rank, [Shard(dim)])
    assert (node.shape, [name for name, _ in node.inner]) == ((4, 4), ["high", "low"])
    parts = [leaf.part for leaf in found.leaves]
    assert {part.shape for part in parts if part is not None} == {(4, 4)}
    assert {part.box.offsets for part in parts if part is not None} == {(2 * rank, 0) if dim == 0 else (0, 2 * rank)}


def test_a_tensor_that_every_rank_has_is_stored_once_whatever_its_class() -> None:
    kinds = []
    for rank in range(2):
        with rank_of(rank, 2):
            found, node = captured(PerRow, rank, [Replicate()])
        kinds.append(tree.encode(node))
        assert {leaf.part.shape for leaf in found.leaves if leaf.part is not None} == {(4, 4), (4, 1)}
    assert kinds[0] == kinds[1]


def own_part(rank: int) -> Saved:
    with rank_of(rank, 2):
        found, node = captured(PerRow, rank)
    assert (node.kind, node.shape, [name for name, _ in node.inner]) == ("part", (4, 4), ["local"])
    return write(found)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_that_is_stored_as_it_is_comes_back_to_the_rank_that_holds_it(rank: int) -> None:
    saved = own_part(rank)
    assert set(saved.entries) == {"x.local.high", "x.local.low"}
    with rank_of(rank, 2):
        target = {"x": distributed(PerRow, rank, at=1)}
        saved.load(target, classes=CLASSES)
        expected = distributed(PerRow, rank)
    for name in ("high", "low"):
        assert bytes_of(getattr(target["x"]._local_tensor, name)) == bytes_of(getattr(expected._local_tensor, name))


@pytest.mark.parametrize("scale", [0.5, {"scales": [np.float32(2)]}, Recipe(8, 0.5)])  # type: ignore[arg-type]  # a scale
def test_a_part_with_numbers_of_its_own_rank_in_its_context_is_stored_as_it_is(scale: Any) -> None:
    """SHARDEDKIND-3: with its own scale, a rank would misread the elements of another."""
    for placement, kind in ((Shard(0), "part"), (Replicate(), f"{Halves.__module__}:Halves")):
        with rank_of(1, 2):
            target = distributed(Halves, 1, [placement])
            target._local_tensor.recipe = scale
            found = capture({"x": target}, None, exclude_frozen_parameters=False, classes=CLASSES)
        assert isinstance(found.tree, tree.Dict)
        assert dict(dict(found.tree.items)["state"].items)["x"].kind == kind  # type: ignore[index, union-attr]  # of a state


def test_a_part_becomes_an_ordinary_one_if_asked() -> None:
    saved = own_part(1)
    with rank_of(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        target = {"x": DTensor.from_local(torch.zeros(2, 4), mesh, [Shard(0)], run_check=False)}
        saved.load(target, classes=CLASSES, cast=True)
    assert torch.equal(target["x"]._local_tensor, PerRow.of(ROWS[2:]).dequantize())


def test_a_part_has_no_other_place() -> None:
    saved = own_part(1)
    words = r"x: a .*PerRow tensor of float32\[4, 4\] is stored, of which every rank keeps its own part"
    with rank_of(1, 2):
        for placements in ([Shard(1)], [Replicate()]):
            with pytest.raises(MismatchError, match=words):
                saved.load({"x": distributed(PerRow, 1, placements)}, classes=CLASSES)
    for target in ({"x": PerRow.of(ROWS)}, {"x": torch.zeros(4, 4)}, {}):
        with pytest.raises(MismatchError, match=words):
            saved.load(target, classes=CLASSES, cast=True)


def test_a_part_without_its_local_tensor_is_an_error() -> None:
    saved = own_part(0)
    node = tree.Composite("part", (4, 4), "float32", (("other", tree.Tensor("x.local.high")),))
    root = tree.Dict("dict", (("state", tree.Dict("dict", (("x", node),))), ("client_state", None)))
    with rank_of(0, 2), pytest.raises(FormatError, match="cannot have the inner tensors other"):
        Saved(saved.data, saved.entries, (), root, ()).load({"x": distributed(PerRow, 0)}, classes=CLASSES)
