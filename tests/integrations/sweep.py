"""Twenty trainings in one process, as in a search for hyperparameters: each object is dropped after its training.

sweep.py KIND FOLDER notes in FOLDER/measured, after the fifth and after the last one, the snapshots in memory, threads and
descriptors.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

RUNS, FIRST = 20, 5


def measured() -> list[int]:
    """The snapshots of this process in memory, its threads, and its descriptors of files, memory and sockets."""
    gc.collect()
    for thread in threading.enumerate():  # those that end by themselves
        if thread.name == "checkpointd-rotation":
            thread.join()
    snapshots = sum("memfd:checkpointd-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return [snapshots, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))]


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters())


def plain(folder: Path) -> None:
    from checkpointd_client import Checkpointer

    model, optimizer = model_and_optimizer()
    with Checkpointer(folder) as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        ckpt.save(2, {"model": model, "optimizer": optimizer})


def dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    from checkpointd_client.integrations.dcp import CheckpointdWriter

    model, _ = model_and_optimizer()
    dcp.save(model.state_dict(), storage_writer=CheckpointdWriter(folder, step=1))


def deepspeed(folder: Path) -> None:
    from checkpointd_client.integrations.deepspeed import attach
    from tests.e2e.deepspeed_engines import Kind, make
    from tests.faults.jobs import free_port

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    engine = make(Kind(1))
    attach(engine)
    engine.save_checkpoint(str(folder))
    engine.destroy()  # DeepSpeed itself keeps an engine that nobody has destroyed


def trainer(folder: Path, *, fails: bool = False) -> None:
    from checkpointd_client.integrations import huggingface

    huggingface.install()
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Pruned(TrainerCallback):
        """As of a search that gives a trial up."""

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if fails and state.global_step == 3:
                raise InterruptedError

    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    settings = TrainingArguments(
        str(folder), max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to=[], disable_tqdm=True, use_cpu=True
    )
    with suppress(InterruptedError):
        Trainer(LlamaForCausalLM(config), settings, train_dataset=data, callbacks=[Pruned()]).train()


def pruned(folder: Path) -> None:
    trainer(folder, fails=True)


def accelerate(folder: Path) -> None:
    from checkpointd_client.integrations import huggingface

    huggingface.install()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*model_and_optimizer())
    accelerator.save_state(str(folder / "first"))


def lightning(folder: Path) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from checkpointd_client.integrations.lightning import CheckpointdIO
    from tests.integrations.lightning.training import Data, Model

    kept = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_last=True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(plugins=[CheckpointdIO()], callbacks=[kept], max_steps=4, accelerator="cpu", **quiet)
    trainer.fit(Model("automatic"), datamodule=Data("starts"))


def torchtitan(folder: Path) -> None:
    import torch.distributed as dist

    from tests.integrations.torchtitan.titan_job import Job

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    job = Job()
    manager = job.manager(folder, async_mode="async_with_pinned_mem")
    manager.load()
    job.train(manager, 2)
    manager.close()


def ray(folder: Path) -> None:
    from ray import train

    from checkpointd_client.integrations.ray import RayCheckpointer
    from tests.integrations.ray.test_checkpointer import Worker

    worker = Worker(folder)
    folder.mkdir(parents=True)
    train.get_context, train.report = lambda: worker, worker.report
    with RayCheckpointer() as ckpt:
        ckpt.report({"loss": 1.0}, 1, {"weight": torch.ones(64)})
        worker.upload()


KINDS: dict[str, Callable[[Path], None]] = {
    one.__name__: one for one in (plain, dcp, deepspeed, trainer, pruned, accelerate, lightning, torchtitan, ray)
}


def main(kind: str, folder: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    found = []
    for run in range(RUNS):
        KINDS[kind](Path(folder) / str(run))
        if run + 1 in (FIRST, RUNS):
            found.append(measured())
    (Path(folder) / "measured").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
