"""Which elements of which parameters lie where in the flat tensors of a ZeRO optimizer."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install checkpointd[deepspeed]")

import torch
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from checkpointd_client.integrations.deepspeed.zero import Range, _bundles
from checkpointd_client.sharding import Group


def ranges(rank: int, **attributes: Any) -> list[Range]:
    """Of partition `rank`, of 8 elements, of a parameter of 6 elements and one of 5."""
    parameters = [torch.zeros(2, 3), torch.zeros(5)]
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.single_partition_of_fp32_groups = [torch.zeros(8)]
    optimizer.round_robin_bit16_groups = [parameters]
    for name, value in attributes.items():
        setattr(optimizer, name, value)
    names = {id(parameters[0]): "a", id(parameters[1]): "b"}
    (bundle,) = _bundles(optimizer, names, Group(rank, 2))
    return list(bundle.ranges)


def test_parameters_lie_end_to_end_in_releases_that_say_no_offsets() -> None:
    assert ranges(0) == [Range("a", (2, 3), 0, 6, 0), Range("b", (5,), 0, 2, 6)]
    assert ranges(1) == [Range("a", (2, 3), 6, 0, 0), Range("b", (5,), 2, 3, 0)]


def test_parameters_lie_where_the_release_says() -> None:
    assert ranges(0, round_robin_bit16_offsets=[[0, 8]])[1] == Range("b", (5,), 0, 0, 0)
    assert ranges(1, round_robin_bit16_offsets=[[0, 8]])[1] == Range("b", (5,), 0, 5, 0)
