"""recapture.py: what a Checkpointer's saves capture, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from checkpointd_client.capture.recapture import Capturer
from checkpointd_client.capture.state import Captured


def captured(capturer: Capturer, state: dict[str, Any], *, exclude_frozen: bool = False) -> Captured:
    return capturer.capture(state, None, exclude_frozen_parameters=exclude_frozen)


def two_of(made: Callable[[], torch.Tensor]) -> dict[str, Any]:
    return {"a": made(), "b": made()}


ARRANGED: list[dict[str, Any]] = [
    two_of(lambda: torch.ones(2, 3)),
    {"b": torch.ones(2, 3), "a": torch.ones(2, 3)},
    two_of(lambda: torch.ones(3, 2)),
    two_of(lambda: torch.ones(3, 2).T),
    two_of(lambda: torch.ones(2, 3, dtype=torch.float64)),
    two_of(lambda: torch.inference_mode()(torch.ones)(2, 3)),
    {"a": torch.ones(2, 3)},
]


@pytest.mark.parametrize("first", range(len(ARRANGED)))
def test_states_share_an_arrangement_only_if_they_differ_in_addresses_alone(first: int) -> None:
    for second in range(len(ARRANGED)):
        capturer = Capturer()
        one, two = captured(capturer, ARRANGED[first]), captured(capturer, ARRANGED[second])
        assert (one.arrangement is two.arrangement) == (first == second)
    moved = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in ARRANGED[first].items()}
    with torch.inference_mode(ARRANGED[first]["a"].is_inference()):
        moved = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for name, t in moved.items()}
    capturer = Capturer()
    assert captured(capturer, ARRANGED[first]).arrangement is captured(capturer, moved).arrangement


def test_a_tensor_that_an_optimizer_changes_is_arranged_otherwise() -> None:
    capturer, weight = Capturer(), nn.Parameter(torch.ones(2))
    bare = captured(capturer, {"w": weight})
    stepped = captured(capturer, {"w": weight, "optimizer": torch.optim.SGD([weight])})
    assert [leaf.fqn for leaf in bare.leaves] == [leaf.fqn for leaf in stepped.leaves]
    assert bare.arrangement is not stepped.arrangement
