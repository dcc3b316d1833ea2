"""DeepSpeed engines whose ranks hold different parts of a module: a pipeline, and a mixture of experts.

`train(engine, first, last)` takes steps and gives the losses of this rank.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from tests.e2e.deepspeed_engines import deepspeed

WIDTH, BATCH, PARTS = 12, 4, 2
SETTINGS = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": PARTS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}

Train = Callable[[Any, int, int], list[float]]


def _batch(step: int, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(BATCH, WIDTH, generator=chosen), torch.randn(BATCH, WIDTH, generator=chosen)


def make_pipeline(seed: int) -> Any:
    """Two stages, each on one of two ranks."""
    torch.manual_seed(seed)
    layers = [LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)]
    with redirect_stdout(io.StringIO()):  # it prints what it is made of
        module = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=SETTINGS)[0]


def train_pipeline(engine: Any, first: int, last: int) -> list[float]:
    def parts(step: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return iter([_batch(step, part) for part in range(PARTS)])

    return [float(engine.train_batch(parts(step))) for step in range(first, last)]


class Experts(nn.Module):
    """Two experts, each on one of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = MoE(WIDTH, expert=nn.Linear(WIDTH, WIDTH), num_experts=2, ep_size=2, k=1, use_rts=False)

    def forward(self, inputs: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.experts(self.first(inputs))[0], wanted)


def make_experts(seed: int) -> Any:
    torch.manual_seed(seed)
    with redirect_stdout(io.StringIO()):
        module = Experts()
        return deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=SETTINGS)[0]


def train_experts(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        for part in range(PARTS):
            loss = engine(*_batch(step, 10 * engine.global_rank + part))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


PARALLEL: dict[str, tuple[Callable[[int], Any], Train]] = {
    "mixture-of-experts": (make_experts, train_experts),
    "pipeline": (make_pipeline, train_pipeline),  # the last: engines after it take its mesh for theirs
}
