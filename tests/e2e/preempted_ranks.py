"""A training under torchrun that never gets out of its warm-up, or of an evaluation, unless `preempted` says so."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from checkpointd_client import Checkpointer

PATIENCE_S = 60.0
EVALUATED = 3
"""The step after which the evaluation comes."""


def is_preempted_in(ckpt: Checkpointer, step: int, inside: Path) -> bool:
    """Do nothing but ask about `step`, for a long time; whether the answer was yes."""
    inside.touch()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        dist.barrier()  # what the ranks do there, they do together
        if ckpt.preempted(step):
            return True
        threading.Event().wait(0.01)
    return False


def train(ckpt: Checkpointer, where: str, inside: Path) -> int | None:
    """The step at which to save and leave; None where nobody said so."""
    if where == "warm-up":
        return 0 if is_preempted_in(ckpt, 0, inside) else None
    for step in range(1, EVALUATED + 1):
        if ckpt.preempted(step):
            return step
    return EVALUATED if is_preempted_in(ckpt, EVALUATED, inside) else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=["warm-up", "evaluation"])
    parser.add_argument("folder", type=Path)
    where, folder = vars(parser.parse_args()).values()
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank = dist.get_rank()
    with Checkpointer(folder / "root", preempt_signals={signal.SIGTERM: 25.0, signal.SIGUSR1: 120.0}) as ckpt:
        step = train(ckpt, where, folder / f"inside-{rank}")
        if step is None:
            sys.exit(f"rank {rank} heard of no signal")
        ckpt.save(step, {"weights": torch.full((64,), float(step))})
    (folder / f"saved-{rank}").write_text(str(step))


if __name__ == "__main__":
    main()
