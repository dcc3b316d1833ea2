"""What a checkpoint of torchtitan is loaded into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from checkpointd.errors import MismatchError
from checkpointd_client.integrations.torchtitan.targets import TitanTargets
from checkpointd_client.loaded import Loaded


class TrainState:
    """What torchtitan's Trainer is for its checkpoints."""

    def state_dict(self) -> dict[str, int]:
        return {"step": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise AssertionError(state)


class Flat(torch.optim.SGD):
    """An optimizer with a flat state_dict(), as torchtitan's."""

    loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups.weight.lr": self.param_groups[0]["lr"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


def parts() -> dict[str, Any]:
    return {"train_state": TrainState(), "optimizer": Flat([nn.Parameter(torch.zeros(1))], lr=0.1)}


def model() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(2)}


def loaded(step: int, *left: str) -> Loaded:
    return Loaded(f"step-{step}", step, {}, per_rank_left=left)


def stored(step: int) -> dict[str, Any]:
    return {"weight": ..., "optimizer": {"param_groups.weight.lr": 0.5}, "train_state": {"step": step}}


def test_all_parts_are_targets_and_the_optimizer_gets_its_dict_back() -> None:
    mine = parts()
    targets = TitanTargets(model(), mine)
    state = targets.places(stored(3)).state
    assert state.keys() == {"weight", "train_state", "optimizer"}
    assert state["train_state"] is mine["train_state"]
    state["optimizer"]["param_groups.weight.lr"] = 0.5  # as a load does
    assert targets.finish(loaded(3)).keys() == {"weight"}
    assert mine["optimizer"].loaded == {"param_groups.weight.lr": 0.5}


def test_of_step_0_the_model_alone_is_a_target() -> None:
    mine = parts()
    targets = TitanTargets(model(), mine)
    assert targets.places(stored(0)).state.keys() == {"weight"}
    assert targets.finish(loaded(0)).keys() == {"weight"}
    assert mine["optimizer"].loaded is None


def test_only_the_model_is_asked_for() -> None:
    assert TitanTargets(model(), None).places(stored(3)).state.keys() == {"weight"}


def test_a_seed_holds_the_model_alone() -> None:
    targets = TitanTargets(model(), parts())
    assert targets.places({"weight": ...}).state.keys() == {"weight"}
    assert targets.finish(loaded(0)).keys() == {"weight"}


def test_a_run_does_not_go_on_from_the_model_alone() -> None:
    targets = TitanTargets(model(), parts())
    targets.places({"weight": ...})
    with pytest.raises(MismatchError, match=r"step-8 holds the model alone.*--checkpoint.load_step"):
        targets.finish(loaded(8))


def test_values_that_nobody_can_choose_from_end_the_load() -> None:
    targets = TitanTargets(model(), parts())
    targets.places(stored(3))
    with pytest.raises(MismatchError, match=r"train_state: .*--checkpoint.exclude_from_loading"):
        targets.finish(loaded(3, "train_state"))
