"""What the same checkpoint costs with torch.save, which training has to wait for.

Loads the newest checkpoint of `--root` on two ranks, writes that state with torch.save on both at once as often as `--rounds`
says, and prints one line of JSON per round: the seconds of the slower rank until torch.save had returned (`held_s`, the bytes
in the page cache) and until they were on the disk as well (`durable_s`, after fsync).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import AdamW

from checkpointd_client import Checkpointer
from gpt import GPT


def save_blocking(state: Mapping[str, Any], path: Path) -> tuple[float, float]:
    """Seconds until torch.save has returned, and until the file is durable."""
    dist.barrier()
    start = time.perf_counter()
    with path.open("wb") as file:
        torch.save({name: part.state_dict() for name, part in state.items()}, file)
        held = time.perf_counter() - start
        os.fsync(file.fileno())
    return held, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", required=True)
    parser.add_argument("--folder", type=Path, required=True, help="where torch.save writes")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    model = GPT(layers=args.layers, width=args.width, length=args.length, dropout=0.0)
    state = {"model": model, "optimizer": AdamW(model.parameters())}
    with Checkpointer(args.root) as ckpt:
        if ckpt.load(state, strict=False) is None:  # only what was asked for, not loader, scheduler and generators
            raise SystemExit(f"{args.root} holds no checkpoint to measure with")

    path = args.folder / f"blocking-{dist.get_rank()}.pt"
    for _ in range(args.rounds):
        seconds = torch.tensor(save_blocking(state, path), dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        path.unlink()
        if dist.get_rank() == 0:
            print(json.dumps({"held_s": seconds[0].item(), "durable_s": seconds[1].item()}), flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    dist.destroy_process_group()
