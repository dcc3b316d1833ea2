"""Train with DeepSpeed ZeRO, saving in the background, and go on with another number of ranks or at another stage.

    torchrun --standalone --nproc-per-node=2 examples/deepspeed_zero.py --save_dir runs/zero --stage 2
    torchrun --standalone --nproc-per-node=1 examples/deepspeed_zero.py --save_dir runs/zero --stage 1 --steps 40

It runs on CPUs as it is. Two lines are checkpointd's: the import, and `attach`.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # set it to cuda where there are GPUs

import deepspeed
import deepspeed.comm.comm
import torch
import torch.distributed as dist
from torch import nn

from checkpointd_client.integrations.deepspeed import attach

BATCH = 24  # of all ranks together

if os.environ["DS_ACCELERATOR"] == "cpu":
    # Else DeepSpeed compiles an operator for a minute, to do what gloo does as well.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def settings(stage: int) -> dict[str, Any]:
    """What would be in ds_config.json. Layout "checkpointd" loads on any number of ranks; "deepspeed" is DeepSpeed's files."""
    return {
        "train_batch_size": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "checkpoint": {"checkpointd": {"layout": "checkpointd"}},
    }


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the batch of a step. The whole batch does not depend on the number of ranks."""
    x = torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(step))
    y = x.sum(1, keepdim=True) / 4
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return x.chunk(ranks)[rank], y.chunk(ranks)[rank]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save_dir", required=True, help="where DeepSpeed saves; made if missing")
    parser.add_argument("--stage", type=int, choices=[0, 1, 2, 3], default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=5, help="steps")
    args = parser.parse_args()

    deepspeed.init_distributed(dist_backend="gloo" if os.environ["DS_ACCELERATOR"] == "cpu" else None)
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=settings(args.stage))
    attach(engine)  # from here on engine.save_checkpoint returns at once, and commits on all ranks or on none

    path, client_state = engine.load_checkpoint(args.save_dir)  # on every rank
    start = client_state["steps"] if path else 0
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, stage {args.stage}: starting at step {start}", flush=True)
    for step in range(start, args.steps):
        inputs, targets = batch_of(step)
        loss = nn.functional.mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if (step + 1) % args.save_every == 0:
            engine.save_checkpoint(args.save_dir, client_state={"steps": step + 1})  # on every rank, never under `if rank == 0`
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    handle = engine.checkpoint_handle()  # of the last save; None where there was none
    if handle is not None:
        handle.wait()  # raises why it failed, if it did
    engine.destroy()


if __name__ == "__main__":
    main()
