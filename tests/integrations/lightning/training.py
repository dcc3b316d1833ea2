"""Trains a tiny model with Lightning and checkpointd, as the test that starts it says. Run by test_training.py.

Usage: python training.py JSON, a list of objects with the keys of `Given`: one for each training, one after the other.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from torch.utils.data import DataLoader, TensorDataset

from checkpointd_client.integrations.lightning import CheckpointdIO
from tests.integrations.lightning.faults import Fails

WIDTH = 64


@dataclass
class Given:
    """`steps`: when to end. `way`: automatic, manual or averaging. `fail`, `die`: at these steps' saves."""

    directory: str
    steps: int = 8
    way: str = "automatic"
    data: str = "epochs"
    devices: int = 1
    top_k: int = 1
    last: bool | str = True
    fail: tuple[int, ...] = ()
    die: int = 0
    result: str = ""


class Model(pl.LightningModule):
    """Two linear layers; with `way="manual"`, each has an optimizer of its own."""

    def __init__(self, way: str, lr: float = 0.05, sizes: tuple[int, ...] = (8, WIDTH)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = way != "manual"
        self.first, self.second = torch.nn.Linear(*sizes), torch.nn.Linear(sizes[1], 1)
        self.norm = torch.nn.BatchNorm1d(sizes[1])

    def training_step(self, batch: Any, number: int) -> Any:
        loss = self.second(self.norm(self.first(batch[0])).relu()).square().mean()
        self.log("loss", loss.detach())
        if self.automatic_optimization:
            return loss
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            optimizer.step()
            scheduler.step()
        return None

    def configure_optimizers(self) -> Any:
        parts = [self.first, self.second] if not self.automatic_optimization else [self]
        optimizers = [torch.optim.AdamW(part.parameters(), lr=self.hparams["lr"]) for part in parts]
        return optimizers, [torch.optim.lr_scheduler.StepLR(one, 2, 0.5) for one in optimizers]


class Data(pl.LightningDataModule):
    """Four batches an epoch with `data="epochs"`; all in one epoch, from a loader with a state, with "stateful"."""

    def __init__(self, data: str) -> None:
        super().__init__()
        self.data, self.asked = data, 0

    def train_dataloader(self) -> Any:
        rows = torch.randn(32 if self.data == "epochs" else 64, 8, generator=torch.Generator().manual_seed(3))
        self.asked += 1
        if self.data == "epochs":
            return DataLoader(TensorDataset(rows), batch_size=8)
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(TensorDataset(rows), batch_size=8)

    def state_dict(self) -> dict[str, Any]:
        return {"rows": torch.tensor([7])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rows"].item() == 7


class Counts(Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.batches = 0

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def main(given: Given) -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    pl.seed_everything(1)
    io = CheckpointdIO()
    saves = ModelCheckpoint(
        dirpath=given.directory,
        every_n_train_steps=2,
        save_top_k=given.top_k,
        monitor="step" if given.top_k > 1 else None,
        mode="max",
        save_last=given.last or None,
    )
    averaging = [WeightAveraging(avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)] if given.way == "averaging" else []
    trainer = pl.Trainer(
        plugins=[io],
        callbacks=[*averaging, Counts(), Fails(io, given.fail, given.die), saves],
        max_steps=given.steps * (2 if given.way == "manual" else 1),
        accelerator="cpu",
        devices=given.devices,
        strategy="ddp" if given.devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    model = Model(given.way)
    error = ""
    try:
        trainer.fit(model, datamodule=Data(given.data), ckpt_path="last")
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    if given.result and trainer.is_global_zero:
        found = {
            "step": trainer.global_step,
            "model": model.state_dict(),
            "optimizers": [one.state_dict() for one in trainer.optimizers],
            "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            "batches": trainer.callbacks[len(averaging)].batches,
            "averages": [one._average_model.state_dict() for one in averaging if one._average_model is not None],
            "best": saves.best_model_path,
            "error": error,
        }
        torch.save(found, given.result)
    elif error:
        sys.exit(error)


if __name__ == "__main__":
    for said in json.loads(sys.argv[1]):
        main(Given(**said))
