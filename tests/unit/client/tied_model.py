"""A model with tied weights, and a check that named tensors belong to it."""

from __future__ import annotations

import torch


class TiedModel(torch.nn.Module):
    """A language model's shape: the head is the embedding."""

    def __init__(self, *, window: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16)
        self.body = torch.nn.Linear(16, 16).to(torch.bfloat16)
        self.head = torch.nn.Linear(16, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(3))
        if window:
            self.register_buffer("window", self.embed.weight.detach()[10:20, 2:5])
        self.register_buffer("empty", torch.empty(0, 4))


def same(found: dict[str, torch.Tensor], model: torch.nn.Module, dtype: torch.dtype | None = None) -> bool:
    expected = model.state_dict()
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor)
        and found[name].dtype == (dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        for name, tensor in expected.items()
    )
