"""Tiny DeepSpeed engines for tests, on gloo, that take the same steps whatever their number of ranks."""

from __future__ import annotations

import gc
import logging
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402
import deepspeed.comm.comm  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from tests.e2e.rank_cases import CaseNotes  # noqa: E402

# It would be compiled for a minute, and is not needed: gloo does the same.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

_MADE: set[int] = set()
"""Stages of which there was an engine: much is imported for the first."""


class Model(nn.Module):
    """Uneven sizes, a tied weight, a buffer, and what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 27)
        self.hidden = nn.Linear(27, 27)
        self.norm = nn.LayerNorm(27)
        self.head = nn.Linear(27, 19, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(27, 27)
        for parameter in self.frozen.parameters():
            parameter.requires_grad = False
        self.register_buffer("seen", torch.tensor(3, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.hidden(self.embedding(tokens))) + self.frozen(self.embedding(tokens)))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


@dataclass(frozen=True)
class Kind:
    """How an engine is set up."""

    stage: int
    dtype: str = "float32"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"z{self.stage}-{self.dtype}"


def make(kind: Kind, seed: int = 0) -> Any:
    """An engine with new weights."""
    torch.manual_seed(seed)
    model = Model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": kind.stage},
        "bf16": {"enabled": kind.dtype == "bfloat16"},
        **kind.settings,
    }
    groups = [
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.requires_grad and p.ndim == 1], "weight_decay": 0.0},
    ]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=config)[0]
    if kind.stage not in _MADE:
        _MADE.add(kind.stage)
        # DeepSpeed collects garbage many times for each engine; to look through all that was imported takes 0.1 s each time.
        gc.collect()
        gc.freeze()
    return engine


def train(engine: Any, first: int, last: int) -> list[float]:
    """Take steps `first` to `last` - 1; the losses of this rank."""
    losses = []
    for step in range(first, last):
        chosen = torch.Generator().manual_seed(1000 * step + engine.global_rank)
        loss = engine(torch.randint(0, 19, (2, 8), generator=chosen))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


class Findings(CaseNotes):
    """What one rank of a test's job finds wrong."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, int(os.environ["RANK"]))
        self.folder = folder

    def check(self, true: bool, what: str) -> None:
        if not true:
            self.wrong.append(what)
