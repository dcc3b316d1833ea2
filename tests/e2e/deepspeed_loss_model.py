"""The model and the batches for jobs of Hugging Face's Trainer and Accelerate; the model returns its loss."""

from __future__ import annotations

from typing import Any

from tests.e2e.deepspeed_engines import Model  # first: it prepares DeepSpeed for a CPU

import torch  # isort: skip
from torch import nn

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


class WithLoss(nn.Module):
    """As the Trainer expects it; `wide` has so many rows and columns of weights beside, if any."""

    def __init__(self, seed: int, wide: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = Model()
        self.wide = nn.Linear(wide, wide, bias=False) if wide else None

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.inner(tokens)
        return {"loss": loss if self.wide is None else loss + self.wide.weight.square().mean()}


def examples() -> list[dict[str, torch.Tensor]]:
    chosen = torch.Generator().manual_seed(7)
    return [{"tokens": row} for row in torch.randint(0, 19, (64, 8), generator=chosen)]
