"""LOADABLE-1: what a load could not give back is refused at save()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpointd.errors import MismatchError, StateError
from checkpointd_client import Checkpointer, open_checkpoint
from tests.unit.client.capture_and_fill import same, save


class Keeping(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})


def never_loadable() -> Keeping:
    """Without a module, a load takes the state of most parameters for the rule: this one state would contradict it."""
    parameters = [nn.Parameter(torch.zeros(5, 3)) for _ in range(3)]
    optimizer = Keeping(parameters)
    for parameter in parameters:
        optimizer.state[parameter] = {"kept": torch.ones(5, 3)}
    optimizer.state[parameters[0]] = {"kept": torch.ones(7)}
    return optimizer


def test_the_state_of_the_test_cannot_be_loaded() -> None:
    optimizer = never_loadable()
    with pytest.raises(MismatchError):
        save({"o": optimizer}).prepare({"o": optimizer})


def test_loadable_1_such_a_state_does_not_commit(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        with pytest.raises(
            StateError, match=r"could not be loaded into the same objects.*\n.*o\.state\.0: a tensor of shape \(7,\)"
        ):
            ckpt.save(1, {"o": never_loadable()})
        ckpt.save(2, {"x": torch.ones(1)}).wait()
    with open_checkpoint(tmp_path) as opened:
        assert opened.step == 2


def test_loadable_1_it_is_looked_at_again_when_the_structure_changes(tmp_path: Path) -> None:
    optimizer, bad = Keeping([nn.Parameter(torch.zeros(5, 3)) for _ in range(3)]), never_loadable()
    with Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"o": optimizer}).wait()
        pairs = zip(optimizer.param_groups[0]["params"], bad.state.values(), strict=True)
        optimizer.state.update(dict(pairs))
        with pytest.raises(StateError, match="could not be loaded"):
            ckpt.save(2, {"o": optimizer})


def test_the_state_of_a_parameter_may_be_a_tensor() -> None:
    class Bare(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter] = torch.full_like(parameter, 3.0)

    def made() -> dict[str, Any]:
        model = nn.Linear(3, 2)
        return {"model": model, "optimizer": Bare(model.parameters(), lr=0.1)}

    source, target = made(), made()
    source["optimizer"].step()
    save(source).load(target)
    assert same(target["optimizer"].state_dict()["state"], source["optimizer"].state_dict()["state"])
