"""A kind of composite tensors, whose elements lie in other tensors. Each kind takes tensors apart and makes them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

Inner = Mapping[str, torch.Tensor]
"""The inner tensors of a composite tensor, by name."""


@dataclass(frozen=True, slots=True)
class Apart:
    """A composite tensor that was taken apart. `inner`: views of its own memory. `context`: all else, as plain values."""

    inner: dict[str, torch.Tensor]
    context: object = None


@dataclass(frozen=True, slots=True)
class OuterFacts:
    """What every composite tensor has. `shape` is () for a nested tensor, whose shape has no plain numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> OuterFacts:
        return cls(() if tensor.is_nested else tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


class TensorKind(ABC):
    """One kind. `name` is what the state tree has."""

    name: str
    names: frozenset[str] | None = None
    """The names that its inner tensors may have; None if the class decides."""
    needed: frozenset[str] = frozenset()
    """The names that its inner tensors must have."""
    swaps: bool = False
    """Whether `refill` swaps, which torch refuses for a tensor that a weak reference refers to."""

    rounds: bool = True
    """Whether its `copy_` accepts ordinary numbers and rounds them."""

    @abstractmethod
    def apart(self, tensor: Any) -> Apart:
        """Take `tensor` apart. Filling its inner tensors fills `tensor`. ValueError, with the reason, if it cannot be."""

    @abstractmethod
    def made(self, facts: OuterFacts, inner: Inner, context: Any) -> torch.Tensor:
        """A new tensor on the memory of `inner` where that is possible. Any error means that the parts do not fit."""

    @abstractmethod
    def refill(self, live: Any, made: torch.Tensor) -> None:
        """Give `live` the content of `made`, of the same kind, shape and dtype, whatever the shapes of their inner tensors."""

    def packed_shape(self, context: Any) -> object:
        """The shape before packing, if that is not the tensor's own; otherwise None."""
        return None

    def check(self, facts: OuterFacts, inner: Inner, context: Any) -> None:
        """Raise ValueError or RuntimeError if filled inner tensors contradict each other. Most cannot."""
        return

    def plain(self, tensor: Any) -> torch.Tensor:
        """The values of `tensor` as an ordinary tensor. Any error means that it has none."""
        dense: torch.Tensor = tensor.to_dense()
        return dense


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def swap(live: torch.Tensor, made: torch.Tensor) -> None:
    """Give the object `live` all that `made` is. It stays a parameter, and keeps its hooks. RuntimeError or AttributeError if
    torch refuses.
    """
    hooks = {name: getattr(live, name) for name in _HOOKS}
    if isinstance(live, torch.nn.Parameter):
        made = torch.nn.Parameter(made.detach(), requires_grad=live.requires_grad)
    else:
        made = made.detach().requires_grad_(live.requires_grad)
    torch.utils.swap_tensors(live, made)
    for name, found in hooks.items():
        if found:
            setattr(live, name, found)  # torch registers them with the new memory
