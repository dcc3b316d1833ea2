"""A job of one rank whose DeepSpeed optimizer steps in a process of its own, and which may kill itself.

    torchrun --nproc-per-node=1 deepspeed_offload_job.py FOLDER KIND LAYOUT PHASE

PHASE `save`: take steps and save. `resume`: load, take steps and print their losses. All others: load, go on, and end with
SIGKILL in that phase. LAYOUT `stock`: DeepSpeed saves and loads by itself.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch

from checkpointd.pipeline.write import persist
from checkpointd_client.integrations.deepspeed import attach
from checkpointd_client.staging.stager import Staging
from tests.e2e.deepspeed_engines import train
from tests.e2e.deepspeed_offload_engines import end, make, process, superoffload, zenflow

KINDS: dict[str, Callable[[], Any]] = {"superoffload": superoffload, "zenflow": lambda: zenflow(1, overlap=True)}
SAVED, END = 4, 7
PIDS = "pids"
"""The file with the number of each optimizer's process, which outlives a rank that is killed."""

STOPPED = ("backward", "step")
DYING = {"snapshot": (Staging, "finish"), "writing": (persist, "write_shard")}


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def go_on(engine: Any, root: str, phase: str) -> None:
    """Train and save, and die in `phase`."""
    train(engine, SAVED, END)
    with Path(root).parent.joinpath(PIDS).open("a") as file:
        file.write(f"{process(engine).pid}\n")
    if phase in STOPPED:
        os.kill(process(engine).pid, signal.SIGSTOP)  # it does not finish what it is given
        engine.backward(engine(torch.ones(2, 8, dtype=torch.int64)))
        if phase == "backward":
            die()
        optimizer = engine.optimizer
        owner, name = (optimizer.zf_op, "zenflow_adam_wait") if optimizer.zenflow else (optimizer, "_wait_for_async_operations")
        setattr(owner, name, die)
        train(engine, END, END + 3)
    elif phase == "process":
        process(engine).kill()
        process(engine).join()
        train(engine, END, END + 3)
    else:
        setattr(*DYING[phase], die)
        engine.save_checkpoint(root, tag="never")
        train(engine, END, END + 3)
        engine.checkpoint_handle().wait(60)


def main() -> None:
    folder, kind, layout, phase = sys.argv[1:]
    root = os.path.join(folder, f"{kind}-{layout}")
    deepspeed.init_distributed(dist_backend="gloo")
    engine = make(KINDS[kind](), seed=int(phase != "save"))
    plug = attach(engine, layout=None if layout == "stock" else layout)  # counts ZenFlow's steps
    if layout == "stock":
        plug.detach()
    if phase == "save":
        train(engine, 0, SAVED)
        assert plug._process.fault(60.0) is None  # DeepSpeed's own save does not wait for the process
        engine.save_checkpoint(root, tag="good")
        if layout != "stock":
            engine.checkpoint_handle().wait(60)
    else:
        print("loaded", engine.load_checkpoint(root)[0], flush=True)
    if phase == "resume":
        print("losses", train(engine, SAVED, END), flush=True)
    elif phase != "save":
        go_on(engine, root, phase)
        print("survived", flush=True)
    end(engine)


if __name__ == "__main__":
    main()
