"""A short training whose every moment is known, on the CPU or on one or two devices: the same bits wherever it runs.

A step has two halves: the forward pass changes buffers, the optimizer's step changes parameters. So moment `2 * n` is after
step n, and moment `2 * n + 1` after the forward pass of the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

STEPS = 4
CHANGED_BY_HAND = 2
"""After this step, parameters are changed without an optimizer."""
CPU = torch.device("cpu")


class Net(nn.Module):
    """One tensor of each kind: strided, tied, frozen, bfloat16, of no dimension, and buffers that change in the forward pass.

    The middle may be on a device of its own.
    """

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.words = nn.Embedding(12, 16)
        self.attention = nn.Linear(16, 48)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight = self.words.weight
        self.middle = nn.ModuleDict({"frozen": nn.Linear(16, 16), "mix": nn.Linear(16, 16, dtype=torch.bfloat16)})
        self.middle["frozen"].requires_grad_(False)
        self.middle.register_parameter("strided", nn.Parameter(torch.randn(16, 16).t()))
        self.register_buffer("average", torch.zeros(4, 4, 16))

    def forward(self, images: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(images)).relu().flatten(2) + self.words(words)
        q, k, v = self.attention(x).chunk(3, dim=-1)
        x = x + (q @ k.transpose(1, 2) / 4).softmax(dim=-1) @ v
        self.average.mul_(0.5).add_(x.detach())
        return self.head(x + self._middle(x.to(self.middle["frozen"].weight.device)).to(x.device))

    def _middle(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle["frozen"](x @ self.middle.strided)
        return self.middle["mix"](x.to(torch.bfloat16)).to(torch.float32)


class Training:
    """A net and its optimizer at `moment`, the outer layers on `outer` and those in the middle on `middle`."""

    def __init__(self, outer: torch.device = CPU, middle: torch.device = CPU) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            self.net = Net().to(outer)
        self.net.middle.to(middle)
        self.net.head.weight = self.net.words.weight  # on some devices, .to() makes two parameters of a tied one
        trained = [p for p in self.net.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05, foreach=True)
        self.outer, self.moment = outer, 0
        self._loss = torch.empty(0)

    @property
    def state(self) -> dict[str, object]:
        return {"net": self.net, "optimizer": self.optimizer}

    @property
    def is_over(self) -> bool:
        return self.moment == 2 * STEPS

    def go_on(self, fence: Callable[[], None]) -> None:
        """Train for half a step. `fence` is called before parameters are changed by hand."""
        n, half = divmod(self.moment, 2)
        if half:
            self.optimizer.zero_grad()
            self._loss.backward()
            self.optimizer.step()
            if n + 1 == CHANGED_BY_HAND:
                fence()
                self.net.head.weight.data.mul_(0.5)  # through .data, so torch counts no change
                self.net.middle.strided.data.add_(1.0)
        else:
            images, words = (batch.to(self.outer) for batch in batches()[n])
            logits = self.net(images, words)
            self._loss = nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten())
        self.moment += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the state by name, as bytes in host memory that nothing changes any more."""
        found = dict(self.net.state_dict())
        for i, of_one in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{i}.{name}": tensor for name, tensor in of_one.items()}
        return {name: tensor.detach().cpu().clone().reshape(-1).view(torch.uint8) for name, tensor in found.items()}


@cache
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    dice = torch.Generator().manual_seed(8)
    return [(torch.randn(4, 2, 6, 6, generator=dice), torch.randint(12, (4, 4), generator=dice)) for _ in range(STEPS)]


@cache
def on_the_cpu() -> list[dict[str, torch.Tensor]]:
    """The tensors at every moment of the training on the CPU."""
    training = Training()
    moments = [training.tensors()]
    while not training.is_over:
        training.go_on(lambda: None)
        moments.append(training.tensors())
    return moments


def differences(found: dict[str, torch.Tensor], moment: int) -> list[str]:
    """The names of tensors that differ from those on the CPU at `moment`."""
    right = on_the_cpu()[moment]
    return [
        name for name in sorted(found | right) if name not in found or name not in right or not found[name].equal(right[name])
    ]
