"""Evaluate each checkpoint of a job that goes on training: in one process, whatever the job's parallelism.

    python examples/evaluate.py --root runs/sharded --until 19

It writes nothing and takes no lock, so the job never notices. It is right for the checkpoints of examples/sharded.py. If a
checkpoint cannot be evaluated, for example because retention has removed it first, it says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

from checkpointd_client import open_checkpoint
from checkpointd_client.errors import DamagedError, NotFoundError


def evaluate(model: nn.Module) -> float:
    """The loss on data that the training has not seen."""
    x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1_000_000))
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 4).item()


def listed(root: str) -> list[dict[str, Any]]:
    """What has been committed at `root`, the oldest first, and removed since or not. Nothing before the job has begun."""
    command = [sys.executable, "-m", "checkpointd", "list", root, "--all", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == NotFoundError.exit_code:
        return []
    if done.returncode:
        sys.exit(json.loads(done.stderr)["error"]["message"])
    rows = json.loads(done.stdout)["rows"]
    return [row for row in reversed(rows) if row["state"] not in ("aborted", "in-doubt")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", required=True, help="directory of the job's checkpoints")
    parser.add_argument("--until", type=int, required=True, help="leave after this step")
    parser.add_argument("--every", type=float, default=5, help="seconds between two looks")
    args = parser.parse_args()

    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))  # plain, though the job shards it
    seen: set[tuple[str, str]] = set()
    newest = -1
    while newest < args.until:
        found = [row for row in listed(args.root) if (row["tag"], row["attempt"]) not in seen]
        if not found and not seen:
            print(f"no checkpoint is at {args.root} yet; looking again every {args.every:g} s", flush=True)
        for row in found:
            tag, attempt, step = row["tag"], row["attempt"], row["step"] or 0
            seen.add((tag, attempt))
            newest = max(newest, step)
            try:
                if row["state"] != "committed":
                    raise NotFoundError(row["why"])
                with open_checkpoint(args.root, tag, attempt=attempt) as checkpoint:
                    checkpoint.load({"model": model}, only="model")  # in place; the optimizer is not read
                    trained = checkpoint.metrics.get("loss", float("nan"))
            except (NotFoundError, DamagedError) as error:
                print(f"step {step:4d}  skipped: {error}", flush=True)
            else:
                print(f"step {step:4d}  loss {evaluate(model):.4f}  in training {trained:.4f}", flush=True)
        if newest < args.until:
            time.sleep(args.every)


if __name__ == "__main__":
    main()
