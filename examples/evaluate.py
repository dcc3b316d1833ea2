"""Evaluate each new checkpoint of a job that goes on training: in one process, whatever the job's parallelism.

    python examples/evaluate.py --root runs/sharded --until 19

It writes nothing and takes no lock, so the job never notices. It is right for the checkpoints of examples/sharded.py.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from checkpointd_client import open_checkpoint
from checkpointd_client.errors import NotFoundError


def evaluate(model: nn.Module) -> float:
    """The loss on data that the training has not seen."""
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 4).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the job's checkpoints")
    parser.add_argument("--until", type=int, required=True, help="leave after this step")
    parser.add_argument("--every", type=float, default=5, help="seconds between two looks")
    args = parser.parse_args()

    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))  # plain, though the job shards it
    seen = -1
    while seen < args.until:
        try:
            with open_checkpoint(args.root) as checkpoint:  # the newest
                if checkpoint.step > seen:
                    checkpoint.load({"model": model}, only="model")  # in place; the optimizer is not read
                    trained = checkpoint.metrics.get("loss", float("nan"))
                    print(f"step {checkpoint.step:4d}  loss {evaluate(model):.4f}  in training {trained:.4f}", flush=True)
                    seen = checkpoint.step
        except NotFoundError:  # nothing is committed yet, or retention removed it while it was read
            pass
        if seen < args.until:
            time.sleep(args.every)


if __name__ == "__main__":
    main()
