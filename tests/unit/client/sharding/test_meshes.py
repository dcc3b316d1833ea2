"""meshes.py: states of DTensors without their modules, as every rank of a simulated job sees them, planned together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from checkpointd.layout.boxes import whole
from checkpointd.layout.indexes import PlanTensor
from checkpointd.layout.plan import NumberedPlan, PlanComparison, TensorNumbers, compared
from checkpointd_client.capture.state import capture
from checkpointd_client.sharding.dtensor import ReplicaGroup
from checkpointd_client.sharding.meshes import beyond
from tests.unit.client.simulated_ranks import rank_of
from tests.unit.layout.test_plan import plan


def placed(full: torch.Tensor, mesh: DeviceMesh, *placements: Any) -> DTensor:
    """The part of `full` that this rank has."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = full
    for i, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(i), placement.dim)[coordinate[i]]
    return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def planned(world: int, state: Callable[[], dict[str, Any]]) -> PlanComparison:
    """What all ranks say together that they write of `state`."""
    names, listings = TensorNumbers(), {}
    for rank in range(world):
        with rank_of(rank, world):
            leaves = capture(state(), None, exclude_frozen_parameters=False).leaves
        tensors = [
            PlanTensor(leaf.fqn, leaf.dtype, leaf.part.shape, leaf.part.box, "global")
            if leaf.part is not None
            else PlanTensor(leaf.fqn, leaf.dtype, tuple(leaf.tensor.shape), whole(tuple(leaf.tensor.shape)), "rank")
            for leaf in leaves
        ]
        listings[rank] = NumberedPlan.of(plan(rank, *tensors, world_size=world), names)
    return compared(listings, names)


def grid(names: tuple[str, str] = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def weights(mesh: DeviceMesh) -> dict[str, DTensor]:
    """One on the whole mesh, and one on each part of it."""
    return {
        "up": placed(torch.ones(8, 6), mesh, Shard(1), Shard(0)),
        "norm": placed(torch.ones(6), mesh["dp"], Shard(0)),
        "head": placed(torch.ones(6, 4), mesh["tp"], Shard(0)),
    }


def test_a_flat_dict_is_planned_on_the_largest_mesh_that_it_shows() -> None:
    assert planned(4, lambda: {"average": weights(grid())}) == PlanComparison()


def test_lists_and_objects_with_a_state_are_planned_together() -> None:
    class Holder:
        def __init__(self, content: Any) -> None:
            self.content = content

        def state_dict(self) -> dict[str, Any]:
            return {"inside": self.content}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.content = state["inside"]

    def state() -> dict[str, Any]:
        found = weights(grid())
        return {"list": [found["norm"]], "app": Holder(found["up"]), "deep": {"er": {"head": found["head"]}}}

    assert planned(4, state) == PlanComparison()


def test_an_optimizer_without_its_module_is_planned_with_the_dict_of_it() -> None:
    def state() -> dict[str, Any]:
        mesh = grid()
        optimizer = torch.optim.AdamW([torch.nn.Parameter(tensor) for tensor in weights(mesh).values()])
        for parameter, average in zip(optimizer.param_groups[0]["params"], weights(mesh).values(), strict=True):
            optimizer.state[parameter] = {"step": torch.ones(()), "exp_avg": average}
        return {"optimizer": optimizer}

    assert planned(4, state) == PlanComparison()


def test_nameless_meshes_are_known_by_their_ranks() -> None:
    def state() -> dict[str, Any]:
        rank = dist.get_rank()
        both = DeviceMesh("cpu", [[0, 1], [2, 3]])
        row = DeviceMesh("cpu", [0, 1] if rank < 2 else [2, 3])
        return {"w": {"both": placed(torch.ones(4, 4), both, Shard(0), Shard(1)), "row": placed(torch.ones(4), row, Shard(0))}}

    assert planned(4, state) == PlanComparison()


def test_what_no_larger_mesh_explains_is_left_to_the_values() -> None:
    """Replicas over `dp` of which the state shows nothing: every box is listed twice, and must be equal."""

    def state() -> dict[str, Any]:
        return {"average": {"up": placed(torch.ones(8), grid()["tp"], Shard(0))}}

    found = planned(4, state)
    assert found.fault is None
    assert [one.ranks for one in found.doubled] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("names", [("replicate", "shard"), ("dp", "tp")])
def test_the_other_dimensions_of_a_mesh(names: tuple[str, str]) -> None:
    with rank_of(2, 4):
        mesh = grid(names)
        found = beyond([mesh[names[0]], mesh, mesh[names[1]], mesh])
        assert found == {mesh[names[0]]: ReplicaGroup(0, 2), mesh[names[1]]: ReplicaGroup(1, 2)}
        assert beyond([mesh]) == {}


def test_meshes_that_share_only_some_ranks_explain_nothing() -> None:
    with rank_of(0, 4):
        three, two = DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [0, 3])
        assert beyond([three, two]) == {}


def test_experts_on_a_mesh_of_their_own_are_no_replicas_of_each_other() -> None:
    """Its one rank is a part of every mesh; its name says that it is none of this one."""

    def state() -> dict[str, Any]:
        dense, experts = grid(), init_device_mesh("cpu", (1, 4), mesh_dim_names=("edp", "ep"))["edp"]
        up = placed(torch.ones(8, 6), dense, Shard(1), Shard(0))
        return {"model": {"up": up, "expert": placed(torch.full((8,), float(dist.get_rank())), experts, Shard(0))}}

    found = planned(4, state)
    assert [(one.fqn, one.ranks) for one in found.doubled] == [("model.expert", (0, 1, 2, 3))]


def test_replicated_over_all_is_written_once() -> None:
    def state() -> dict[str, Any]:
        mesh = grid()
        return {"a": {"whole": placed(torch.ones(6, 4), mesh, Replicate(), Replicate()), **weights(mesh)}}

    assert planned(4, state) == PlanComparison()
