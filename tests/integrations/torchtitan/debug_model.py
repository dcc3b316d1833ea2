"""Trains torchtitan's debug model on the CPU through its own entry point: several runs in one process, each with its own
arguments. Run it with torchrun: `debug_model.py FOLDER RUNS`, where RUNS is JSON.

It is also the module with the config functions that `--module` names.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.integrations.torchtitan import titan_on_cpu  # isort: skip  # before torchtitan

titan_on_cpu.prepare()

import torchtitan.train
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.distributed import utils as dist_utils
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from checkpointd_client.integrations.torchtitan import CheckpointdManager
from tests.faults.jobs import wait_until

COMMON = ["--training.seq_len", "32", "--training.local_batch_size", "2", "--parallelism.spmd_backend", "partial_dtensor"]


def stock() -> Trainer.Config:
    """The debug model, with torchtitan's own manager."""
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.training.disable_cuda_graphs = True
    config.checkpoint = CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False)
    return config


def ours() -> Trainer.Config:
    """The debug model, with checkpointd."""
    config = stock()
    config.checkpoint = CheckpointdManager.Config(enable=True, interval=2, last_save_model_only=False)
    return config


@dataclass(frozen=True)
class Run:
    """One run. `stop`: leave the training loop after this step. `kill`: let rank 1 die by SIGKILL as soon as the save of this
    step writes something. `resave`: save what was loaded, and do not train.
    """

    args: list[str]
    config: str = "ours"
    stop: int | None = None
    kill: int | None = None
    resave: bool = False
    common: list[str] = field(default_factory=lambda: list(COMMON))


def train(folder: Path, run: Run) -> None:
    """One run of torchtitan's own main()."""
    module = ["--module", "tests.integrations.torchtitan.debug_model", "--config", run.config]
    data = ["--hf_assets_path", str(folder / "tokenizer"), "--dataloader.dataset_path", str(folder / "texts")]
    sys.argv = ["train.py", *module, *data, *run.common, *run.args]
    continues, save = Trainer.should_continue_training, CheckpointManager.save

    def should_continue(trainer: Trainer) -> bool:
        if run.resave:
            trainer.checkpointer.save(trainer.step, last_step=True)
            return False
        return bool(continues(trainer)) and trainer.step != run.stop

    def saved(manager: CheckpointManager, curr_step: int, last_step: bool = False) -> bool:
        begun = bool(save(manager, curr_step, last_step))
        if curr_step == run.kill and os.environ["RANK"] == "1":
            tag = Path(run.args[run.args.index("--dump_folder") + 1]) / "checkpoint" / f"step-{curr_step}"
            wait_until(lambda: tag.is_dir() and any(tag.iterdir()), "the save has begun to write")
            os.kill(os.getpid(), signal.SIGKILL)
        return begun

    Trainer.should_continue_training, CheckpointManager.save = should_continue, saved
    try:
        torchtitan.train.main()
    finally:
        Trainer.should_continue_training, CheckpointManager.save = continues, save


def main() -> None:
    folder, runs = Path(sys.argv[1]), [Run(**run) for run in json.loads(sys.argv[2])]
    dist_utils.set_pg_timeouts = lambda **_: None
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda: None
    for run in runs:
        train(folder, run)
    destroy()


if __name__ == "__main__":
    main()
