"""DeepSpeed engines whose optimizer steps in a process of its own, on a machine without a GPU: SuperOffload and ZenFlow.

DeepSpeed's classes are the real ones, with their processes and their compiled CPUAdam. Two things stand in for CUDA:
SuperOffload does not ask whether it is there, and ZenFlow's tensors for "cuda" at stage 3 are made on the CPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.superoffload import superoffload_stage3
from deepspeed.runtime.zenflow import engine_stage3
from torch import nn

from tests.e2e.deepspeed_engines import Kind


class _HostTorch:
    """Torch, whose device "cuda" is the CPU."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("zeros", "tensor"):
            return found
        return lambda *args, **kwargs: found(*args, **{**kwargs, "device": "cpu"})


superoffload_stage3._validate_superoffload_accelerator = lambda: None
engine_stage3.torch = _HostTorch()
if not hasattr(get_accelerator().current_stream(), "synchronize"):
    get_accelerator().current_stream = lambda: SimpleNamespace(synchronize=lambda: None)

ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
OFFLOADED = {"device": "cpu", "pin_memory": False}


def superoffload(dtype: str = "bfloat16", *, clipped: bool = False) -> Kind:
    """With clipping, all steps are given to the process in `step()`, and otherwise in the backward pass."""
    zero = {"stage": 3, "sub_group_size": 900, "offload_optimizer": {**OFFLOADED, "super_offload": True}}
    clipping = 1.0 if clipped else 0.0
    return Kind(3, dtype, {"optimizer": ADAM, "zero_optimization": zero, "gradient_clipping": clipping})


def zenflow(stage: int, dtype: str = "bfloat16", *, overlap: bool, interval: int = 2) -> Kind:
    """With `overlap`, another process steps what was not selected. At stage 3, ZenFlow can select only once if there are
    several ranks.
    """
    select = 4 if stage < 3 else 1000
    settings = {"topk_ratio": 0.2, "select_strategy": "step", "select_interval": select, "update_interval": interval}
    settings |= {"full_warm_up_rounds": 2, "overlap_step": overlap, "pt_reserved_cores_perc": 0.5}
    zero = {"stage": stage, "offload_optimizer": OFFLOADED, "overlap_comm": True, "zenflow": settings}
    return Kind(stage, dtype, {"optimizer": ADAM, "zero_optimization": zero, "gradient_clipping": 0.0})


class Model(nn.Module):
    """Matrices of both orientations and a square one. ZenFlow cannot train tied weights or odd sizes at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 28)
        self.square = nn.Linear(28, 28)
        self.wide = nn.Linear(28, 42)
        self.head = nn.Linear(42, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.wide(torch.tanh(self.square(self.embedding(tokens)))))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


def make(kind: Kind, seed: int = 0) -> Any:
    """An engine with new weights."""
    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "bf16": {"enabled": kind.dtype == "bfloat16"},
        "zero_optimization": {"stage": kind.stage},
        **kind.settings,
    }
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    return deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]


def end(engine: Any) -> None:
    """Destroy an engine and end its process, which DeepSpeed leaves behind."""
    running = process(engine)
    engine.destroy()
    if running is not None:
        running.kill()
        running.join()


def process(engine: Any) -> Any:
    """That of the engine's optimizer."""
    offloaded = getattr(engine.optimizer, "superoffload_cpu_optimizer", None)
    return getattr(engine.optimizer, "process", None) if offloaded is None else offloaded.cpuadam_process
