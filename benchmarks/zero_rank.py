"""One rank of a trial of `zero.py`, under torchrun."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import disk

QUIET_STEPS = 12
LAST = "last"


def measure(attached: dict[str, Any] | None, stage: int, folder: Path, layers: int, width: int) -> None:
    """The whole trial of this rank; what it saw goes to `rank-<rank>.json` in `folder`."""
    torch.set_num_threads(1)
    training = Training(stage, layers, width)
    root = folder / "root"
    root.mkdir(exist_ok=True)
    if attached is not None:
        from checkpointd_client.integrations.deepspeed import attach

        attach(training.engine, **attached)
    training.step()
    for number in range(2):
        call = Save(training.engine, root, f"warm{number}", stock=attached is None)
        call.finished.wait()
        dist.barrier()
        training.step()
    quiet_s = training.seconds_per_step()
    saving, window_s, steps = training.save_amid_steps(lambda: Save(training.engine, root, LAST, stock=attached is None))
    quiet_s = (quiet_s + training.seconds_per_step()) / 2
    load_s, equal = training.load(root, saving.step)
    found = {
        "call_s": saving.call_s,
        "durable_s": saving.durable_s,
        "lost_s": window_s - steps * quiet_s,
        "load_s": load_s,
        "equal": equal,
    }
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DeepSpeed's atexit hooks wait for ranks that have left


class Save:
    """One call of save_checkpoint, and a thread that waits until it is durable."""

    def __init__(self, engine: Any, root: Path, tag: str, *, stock: bool) -> None:
        self.step = int(engine.global_steps)
        self.finished = threading.Event()
        self.durable_s = 0.0
        self._start = time.perf_counter()
        engine.save_checkpoint(str(root), tag=tag)
        self.call_s = time.perf_counter() - self._start
        waits = (lambda: _sync(root, tag)) if stock else engine.checkpoint_handle().wait
        threading.Thread(target=self._finish, args=(waits,), daemon=True).start()

    def _finish(self, waits: Callable[[], object]) -> None:
        try:
            waits()
        except BaseException as error:
            print(f"the save failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)  # the others would wait for this rank
        self.durable_s = time.perf_counter() - self._start
        self.finished.set()


def _sync(root: Path, tag: str) -> None:
    """Every rank has written when the call returns, as it ends with a barrier."""
    if dist.get_rank() == 0:
        disk.fsync_tree(root / tag)
        disk.fsync(root / "latest")


class Training:
    """An engine, and steps whose losses depend on their numbers alone."""

    def __init__(self, stage: int, layers: int, width: int) -> None:
        self._width = width
        self.engine = make(stage, layers, width)
        self.losses: dict[int, float] = {}

    def step(self) -> float:
        """Take one; its seconds."""
        start, number = time.perf_counter(), int(self.engine.global_steps)
        chosen = torch.Generator().manual_seed(1000 * number + self.engine.global_rank)
        loss = self.engine(torch.randn(4, self._width, generator=chosen).bfloat16()).float().square().mean()
        self.engine.backward(loss)
        self.engine.step()
        self.losses[number] = loss.item()
        return time.perf_counter() - start

    def seconds_per_step(self) -> float:
        """The mean of some undisturbed ones."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(QUIET_STEPS):
            self.step()
            self._all(True)
        return (time.perf_counter() - start) / QUIET_STEPS

    def save_amid_steps(self, save: Callable[[], Save]) -> tuple[Save, float, int]:
        """Save, and train until it is durable on all ranks; the seconds from the call on, and the steps in them."""
        dist.barrier()
        start, steps = time.perf_counter(), 0
        saving = save()
        while not self._all(saving.finished.is_set()):
            self.step()
            steps += 1
        return saving, time.perf_counter() - start, steps

    def load(self, root: Path, step: int) -> tuple[float, bool]:
        """Seconds that it takes, and whether the steps after it are those that were taken after the save."""
        before = dict(self.losses)
        if dist.get_rank() == 0:
            for folder in root.rglob(LAST):
                disk.warm(folder)
            disk.drop(root)
        dist.barrier()
        start = time.perf_counter()
        path, _ = self.engine.load_checkpoint(str(root), tag=LAST)
        load_s = time.perf_counter() - start
        dist.barrier()
        if path is None or int(self.engine.global_steps) != step:
            return load_s, False
        self.step()
        self.step()
        return load_s, all(self.losses[number] == before[number] for number in (step, step + 1))

    @staticmethod
    def _all(true: bool) -> bool:
        """Whether it is so on all ranks."""
        flag = torch.tensor([int(true)])
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())


def make(stage: int, layers: int, width: int) -> Any:
    """A bf16 engine."""
    warnings.filterwarnings("ignore")
    import deepspeed
    import deepspeed.comm.comm

    # It would be compiled for a minute, and is not needed: gloo does the same.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": True},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
