"""Trains a tiny model that `fully_shard` has sharded over CPU ranks. Run by test_strategy.py.

Usage: python sharded_training.py JSON, where the JSON has the keys of `Given`.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from checkpointd.errors import CheckpointdError
from checkpointd_client.integrations.lightning import CheckpointdModelParallelStrategy
from tests.integrations.lightning.faults import Fails


@dataclass
class Given:
    """`full`: whether rank 0 saves everything as one file. `fail`, `die`: at these steps' saves, on rank 1. `result`: what it
    ended with, from rank 0.
    """

    directory: str
    result: str
    steps: int = 8
    devices: int = 2
    last: bool | str = True
    full: bool = False
    fail: tuple[int, ...] = ()
    die: int = 0
    options: dict[str, Any] = field(default_factory=dict)


class Model(pl.LightningModule):
    """Two linear layers, each with an optimizer of its own in manual optimisation."""

    def __init__(self, manual: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.first, self.second = torch.nn.Linear(6, 33), torch.nn.Linear(33, 1)

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for part in (self.first, self.second, self):
            fully_shard(part, mesh=mesh)

    def training_step(self, batch: Any, number: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(self.second(self.first(batch[0]).relu()).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.first, self.second)]

    def train_dataloader(self) -> Any:
        rows = torch.randn(32, 6, generator=torch.Generator().manual_seed(3))
        return DataLoader(TensorDataset(rows), batch_size=8)


def whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    return value


def main(given: Given) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(1)
    strategy = CheckpointdModelParallelStrategy(
        data_parallel_size=given.devices,
        tensor_parallel_size=1,
        save_distributed_checkpoint=not given.full,
        options=given.options,
    )
    saves = ModelCheckpoint(dirpath=given.directory, every_n_train_steps=4, save_last=given.last)
    trainer = pl.Trainer(
        strategy=strategy,
        callbacks=[Fails(strategy, given.fail, given.die, rank=1, per_batch=2), saves],
        max_steps=2 * given.steps,  # of two optimizers
        accelerator="cpu",
        devices=given.devices,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Model()
    error = ""
    try:
        trainer.fit(model, ckpt_path="last")
    except CheckpointdError as raised:
        error = str(raised)
    found = {
        "error": error,
        "step": trainer.global_step,
        "model": whole(dict(model.state_dict())),
        "optimizers": [[whole(state) for state in one.state.values()] for one in trainer.optimizers],
    }
    if trainer.is_global_zero:
        torch.save(found, given.result)


if __name__ == "__main__":
    main(Given(**json.loads(sys.argv[1])))
