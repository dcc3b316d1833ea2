"""A small job with torchtitan's own containers, in one process: what its Trainer keeps, of a model in two parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

from checkpointd_client.integrations.torchtitan import CheckpointdManager


class Job:
    """What torchtitan's Trainer keeps, of a model in two parts as pipeline parallelism makes them."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.parts = [nn.Sequential(nn.Linear(8, 8)), nn.ModuleDict({"head": nn.Linear(8, 4)})]
        self.optimizers: OptimizersContainer = default_adamw(lr=0.1).build(model_parts=self.parts)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["fused"], group["foreach"] = False, True
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=self.optimizers, training_steps=8)
        self.step, self.ntokens_seen = 0, 0
        self.loader = Loader()

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def manager(
        self, dump: Path, config: type[Any] = CheckpointdManager, parts: dict[str, Any] | None = None, **options: Any
    ) -> Any:
        chosen = config.Config(**{"enable": True, "interval": 1, "last_save_model_only": False, **options})
        return chosen.build(
            dataloader=self.loader,
            model_parts=self.parts,
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            sd_adapter=None,
            base_folder=str(dump),
            **(parts or {}),
        )

    def train(self, manager: Any = None, steps: int = 1, *, last: bool = False) -> None:
        """Train as torchtitan's Trainer does, with a save after each step."""
        for _ in range(steps):
            self.step += 1
            batch = torch.full((2, 8), float(self.loader.next()))
            self.optimizers.zero_grad()
            self.parts[1]["head"](self.parts[0](batch)).square().sum().backward()
            if manager is not None:
                manager.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedulers.step()
            self.ntokens_seen += 16
            if manager is not None:
                manager.save(self.step, last_step=last)

    def everything(self) -> dict[str, Any]:
        model = {name: value.clone() for part in self.parts for name, value in part.state_dict().items()}
        optimizer = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in self.optimizers.state_dict().items()
        }
        return {**model, **optimizer, **self.state_dict(), **self.schedulers.state_dict(), "data": self.loader.position}


class Loader:
    """A data loader whose state is bytes, as that of torchtitan's own."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> int:
        self.position += 1
        return self.position

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": self.position.to_bytes(4, "little"), "world_size": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = int.from_bytes(state["dp_rank_0"], "little")


def assert_equal(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name], name
