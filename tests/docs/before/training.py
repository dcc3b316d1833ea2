"""A training job small enough for a page: what a reader's own script has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ConstantLR

torch.manual_seed(0)


class Loader:
    """A loader as torchdata's StatefulDataLoader is one: it knows where it is."""

    def __init__(self) -> None:
        self.taken = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.taken += 1
            yield torch.randn(4, 8)

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Net(nn.Module):
    """Two layers, one of them in a list, as in most models."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 1)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


model = Net()
optimizer = AdamW(model.parameters())
scheduler = ConstantLR(optimizer)
loader = Loader()
batches = iter(loader)
data = [torch.randn(4, 8) for _ in range(4)]
steps, step, tokens, loss = 3, 2, 0, 0.5
state = {"model": model, "optimizer": optimizer}


def train_one_step() -> None:
    """A step, as any loop has it."""
    model(next(batches)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


train_one_step()
