"""Which elements of which parameters lie where in the flat tensors of a ZeRO optimizer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install '.[deepspeed]'")

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from checkpointd_client.integrations.deepspeed.engine_state import _optimizer_state, versions_of
from checkpointd_client.integrations.deepspeed.load_targets import EngineTargets, LoadRequest
from checkpointd_client.integrations.deepspeed.zero_optimizer import Bundle, Range, _bundles
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
