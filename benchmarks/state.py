"""The state that every system saves: a GPT-shaped module in bf16, fp32 master weights, and a real AdamW.

Five tensors belong to each parameter: the bf16 weight (2 bytes an element), the fp32 master weight, `exp_avg`
and `exp_avg_sq` (4 each), and AdamW's 0-d step: 14 bytes a parameter. The optimizer really steps, on synthetic
gradients, between any two saves, so that every tensor changes and its values look like training's.

With several ranks each one holds its share of the rows of every tensor, as FSDP2 does.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

BYTES_PER_PARAMETER = 14
LAYERS = 23
"""With 6 weights a layer, an embedding and a last norm: 140 parameters, 700 tensors."""
_STEPS_BEFORE_START = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the whole model over all ranks."""

    width: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Elements over all ranks."""
        return LAYERS * (12 * self.width**2 + 2 * self.width) + self.vocabulary * self.width + self.width


def shape_for(target_bytes: int) -> Shape:
    """The shape whose whole state comes closest to `target_bytes`; every dimension a multiple of 8."""
    wanted = target_bytes / BYTES_PER_PARAMETER
    width = max(16, round((wanted / (12 * LAYERS + 16)) ** 0.5 / 8) * 8)
    rest = wanted - Shape(width=width, vocabulary=0).parameters
    return Shape(width=width, vocabulary=max(8, round(rest / width / 8) * 8))


class _Block(nn.Module):
    def __init__(self, width: int, ranks: int) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width // ranks, bias=False)
        self.attention_in = nn.Linear(width, 3 * width // ranks, bias=False)
        self.attention_out = nn.Linear(width, width // ranks, bias=False)
        self.norm_2 = nn.LayerNorm(width // ranks, bias=False)
        self.up = nn.Linear(width, 4 * width // ranks, bias=False)
        self.down = nn.Linear(4 * width, width // ranks, bias=False)


class _Shard(nn.Module):
    """One rank's rows of every weight. Never run forward: the gradients are synthetic."""

    def __init__(self, shape: Shape, ranks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary // ranks, shape.width)
        self.blocks = nn.ModuleList(_Block(shape.width, ranks) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(shape.width // ranks, bias=False)


class State:
    """One rank's modules and optimizer; the same tensors from the first save to the last. Without `trained` they are zeros."""

    def __init__(self, *, target_bytes: int, ranks: int, rank: int, seed: int, trained: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed * 1000 + rank)
        with torch.device("meta"):
            shard = _Shard(shape_for(target_bytes), ranks)
        self.model = copy.deepcopy(shard).to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
        self.master = shard.to_empty(device="cpu")
        for master in self.master.parameters():
            # Kept between steps, as accumulating trainers do: no step allocates, so memory peaks are the saver's.
            master.grad = torch.zeros_like(master)
            if trained:
                initialise(master, generator)
                master.grad.normal_(0.0, 1e-2, generator=generator)
            else:
                nn.init.zeros_(master)
        self.optimizer = torch.optim.AdamW(self.master.parameters(), lr=1e-3, fused=True)
        for _ in range(_STEPS_BEFORE_START if trained else 1):
            self.advance()
        self.tree = self._tree()
        """Nested dictionaries of all tensors, the same objects for every save."""

    def advance(self) -> None:
        """One optimizer step: changes every tensor of the state, and allocates nothing that stays."""
        for master in self.master.parameters():
            assert master.grad is not None
            master.grad.mul_(-0.9)
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                weight.copy_(master)

    def _tree(self) -> dict[str, Any]:
        slots = {name: self.optimizer.state[master] for name, master in self.master.named_parameters()}
        return {
            "model": dict(self.model.state_dict()),
            "master": dict(self.master.state_dict()),
            "optimizer": {key: {name: slot[key] for name, slot in slots.items()} for key in ("exp_avg", "exp_avg_sq", "step")},
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor with its path, as the modules and the optimizer hold it now."""
        return leaves(self._tree())

    def digests(self) -> dict[str, str]:
        """SHA-256 of the bytes of every tensor, by path."""
        return {path: _digest(tensor) for path, tensor in self.tensors()}

    def scribble(self) -> None:
        """Overwrite the first, middle and last element of every tensor: what a save that is safe must survive."""
        for _, tensor in self.tensors():
            flat = tensor.view(-1)
            for at in (0, flat.numel() // 2, flat.numel() - 1):
                flat[at] = 3.0

    def clear(self) -> None:
        """Overwrite all of the state with zeros, so that a load that does nothing is seen."""
        for _, tensor in self.tensors():
            tensor.zero_()


def leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dictionaries, with their paths joined by `/`."""
    for key, value in tree.items():
        if isinstance(value, Tensor):
            yield prefix + key, value
        else:
            yield from leaves(value, f"{prefix}{key}/")


def whole_model(shape: Shape) -> nn.Module:
    """The model as one rank has it alone."""
    return _Shard(shape, ranks=1)


def initialise(weight: Tensor, generator: torch.Generator) -> None:
    """Ones for a norm, small normal values for a matrix."""
    with torch.no_grad():
        if weight.dim() == 1:
            weight.fill_(1.0)
        else:
            weight.normal_(0.0, 0.02, generator=generator)


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(np.asarray(tensor.reshape(-1).view(torch.uint8)).data).hexdigest()
