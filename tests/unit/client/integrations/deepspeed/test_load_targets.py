"""Which elements of which parameters lie where in the flat tensors of a ZeRO optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from checkpointd_client.integrations.deepspeed.engine_state import _optimizer_state, versions_of
from checkpointd_client.integrations.deepspeed.load_targets import EngineTargets, LoadRequest
from checkpointd_client.integrations.deepspeed.zero_optimizer import Bundle, Range, _bundles, parameter_held
from checkpointd_client.restore.target_chooser import StoredTensor
from checkpointd_client.sharding.dtensor import ReplicaGroup


def ranges(rank: int, **attributes: Any) -> list[Range]:
    """Of partition `rank`, of 8 elements, of a parameter of 6 elements and one of 5."""
    parameters = [torch.zeros(2, 3), torch.zeros(5)]
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.single_partition_of_fp32_groups = [torch.zeros(8)]
    optimizer.round_robin_bit16_groups = [parameters]
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    names = {id(parameters[0]): "a", id(parameters[1]): "b"}
    (bundle,) = _bundles(optimizer, names, ReplicaGroup(rank, 2))
    return list(bundle.ranges)


def test_parameters_lie_end_to_end_in_releases_that_say_no_offsets() -> None:
    assert ranges(0) == [Range("a", (2, 3), 0, 6, 0), Range("b", (5,), 0, 2, 6)]
    assert ranges(1) == [Range("a", (2, 3), 6, 0, 0), Range("b", (5,), 2, 3, 0)]


def test_parameters_lie_where_the_release_says() -> None:
    assert ranges(0, round_robin_bit16_offsets=[[0, 8]])[1] == Range("b", (5,), 0, 0, 0)
    assert ranges(1, round_robin_bit16_offsets=[[0, 8]])[1] == Range("b", (5,), 0, 5, 0)


def zenflow_3(rank: int, elements: torch.Tensor) -> tuple[Any, Any, dict[int, str]]:
    """ZenFlow's optimizer of stage 3 with one matrix of 3 rows and 2 columns, which it keeps transposed; half on each rank."""
    part = elements[3 * rank : 3 * rank + 3]
    parameter = SimpleNamespace(
        ds_id=0, ds_shape=(2, 3), ds_numel=6, ds_tensor=part, partition_numel=lambda: 3, requires_grad=True
    )
    optimizer = object.__new__(DeepSpeedZeroOptimizer_Stage3)
    optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat = [[parameter]], [part]
    optimizer.sub_group_to_group_id, optimizer.zenflow = {0: 0}, True
    return optimizer, parameter, {id(parameter): "a"}


def test_zenflows_matrices_are_stored_as_the_module_has_them() -> None:
    """At stage 3 they are transposed for good; before it, in some releases, their elements lie column by column."""
    matrix = torch.arange(6.0).view(3, 2)
    found = torch.zeros(3, 2)
    for rank in (0, 1):
        optimizer, parameter, names = zenflow_3(rank, matrix.t().reshape(-1).clone())
        (bundle,) = _bundles(optimizer, names, ReplicaGroup(rank, 2))
        weight = parameter_held(SimpleNamespace(optimizer=optimizer), parameter, ReplicaGroup(rank, 2))
        for held in (bundle.held(bundle.ranges[0], bundle.tensor), weight):
            assert held.held.shape == (3, 2)
            for part in held.held.parts:
                found[tuple(slice(o, o + n) for o, n in zip(part.box.offsets, part.box.sizes, strict=True))] += part.of(
                    held.tensor
                )
    assert torch.equal(found, 2 * matrix)
    columns = torch.arange(8.0)[:6].view(2, 3).t()
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.single_partition_of_fp32_groups, optimizer.round_robin_bit16_groups = [torch.arange(8.0)], [[columns]]
    (bundle,) = _bundles(optimizer, {id(columns): "a"}, ReplicaGroup(0, 1))
    assert torch.equal(bundle.held(bundle.ranges[0], bundle.tensor).tensor, columns)


@pytest.mark.parametrize("has_process", [False, True])
def test_moments_are_neither_taken_from_nor_given_to_an_optimizer_whose_process_has_them(
    has_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Another kind of optimizer may have left some in the engine, which never uses them."""
    tensor = torch.zeros(2)
    base = torch.optim.Adam([tensor])
    base.state[tensor] = {"exp_avg": torch.ones(2)}
    optimizer = SimpleNamespace(optimizer=base, **({"superoffload_cpu_optimizer": None} if has_process else {}))
    bundle = Bundle(tensor, 0, (Range("a", (2,), 0, 2, 0),), None)
    assert bool(_optimizer_state(SimpleNamespace(optimizer=optimizer), [bundle])) is not has_process
    places = targets(optimizer=optimizer)
    places._bundles = [bundle]
    places._begin({})
    state = {"model.a": {"exp_avg": StoredTensor("float32", (2,))}}
    places._optimizer({"optimizer": {"state": state, "param_groups": [{"params": ["model.a"]}]}})
    assert bool(places._places.state["optimizer"]["state"]) is not has_process
    assert ("the moments in the checkpoint are not loaded" in caplog.text) is has_process


def filled(shapes: list[tuple[int, ...]], **kept: list[tuple[int, ...]]) -> tuple[set[object], set[object], list[str]]:
    """How what is stored of two parameters is loaded: by element, whole, and what is wrong with it."""
    ranges = tuple(Range(name, shape, 0, 2, 2 * i) for i, (name, shape) in enumerate(zip("ab", shapes, strict=True)))
    stored = {
        f"model.{one.name}": {key: StoredTensor("float32", of[i]) for key, of in kept.items()} for i, one in enumerate(ranges)
    }
    tensor = torch.zeros(4)
    optimizer = torch.optim.SGD([tensor])
    places = object.__new__(EngineTargets)
    places.engine, places.what = SimpleNamespace(optimizer=optimizer), LoadRequest()
    places._begin({})
    fresh = places._fill(Bundle(tensor, 0, ranges, None), stored)
    return set(fresh.elements), fresh.whole, places._places.faults


def test_a_value_of_each_parameter_may_be_a_tensor_of_one_element() -> None:
    assert filled([(2, 1), (2,)], exp_avg=[(2, 1), (2,)], counted=[(1,), (1,)], step=[(), ()]) == (
        {"exp_avg"},
        {"counted", "step"},
        [],
    )
    assert filled([(1,), (2,)], counted=[(1,), (1,)]) == (set(), {"counted"}, [])


def test_what_has_another_shape_than_its_parameter_cannot_be_cut() -> None:
    elements, whole, faults = filled([(2, 1), (2,)], rows=[(2,), (2,)])
    assert (elements, whole) == (set(), set())
    assert faults == ["optimizer.state: rows is stored in another shape than its parameters' and cannot be cut for this stage"]


class Second(torch.nn.Linear):
    _version = 2


def targets(**attributes: Any) -> EngineTargets:
    places = object.__new__(EngineTargets)
    places.engine, places.what, places._bundles = SimpleNamespace(**attributes), LoadRequest(), []
    return places


def test_a_part_of_the_module_in_another_version_is_a_fault() -> None:
    """This layout fills memory, and does not ask the module."""
    places = targets(module=torch.nn.Sequential(Second(1, 1), torch.nn.Linear(1, 1)))
    versions = {"": {"version": 1}, "0": {"version": 1}, "1": {"version": 1}, "gone": {"version": 1}}
    places._begin({"deepspeed": {"versions": versions}})
    places._check_versions()
    [fault] = places._places.faults
    assert fault.startswith("model.0: its version was {'version': 1} when it was saved, and is {'version': 2} now")
    places._begin({"deepspeed": {"versions": versions_of(places.engine)}})
    places._check_versions()
    assert not places._places.faults


def test_what_the_optimizer_keeps_for_no_parameter_is_stored_and_set_again() -> None:
    optimizer = torch.optim.SGD([torch.zeros(4)])
    optimizer.state["k"] = torch.tensor([3])  # type: ignore[index]  # as MADGRAD has it
    places = targets(optimizer=optimizer)
    stored = {"state": _optimizer_state(places.engine, []), "param_groups": [{"params": []}]}
    assert stored["state"] == {"k": torch.tensor([3])}
    places._begin({"optimizer": stored})
    places._optimizer({"optimizer": stored})
    assert places._places.state["optimizer"]["state"] == {"k": None}
    places._groups = [None]
    optimizer.state.clear()
    places._settle_optimizer(stored)
    assert optimizer.state == {"k": torch.tensor([3])}
