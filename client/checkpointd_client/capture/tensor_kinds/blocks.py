"""Classes of tensors that keep an item for each block of consecutive elements, such as torchao's states of optimizers.

A rank that holds consecutive rows of such a tensor holds whole blocks. So its inner tensors are parts of the inner tensors of
the whole tensor, and can be stored and loaded as these. Here a range counts elements in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from checkpointd.layout.boxes import Box
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard, ReplicaGroup, replicated


@dataclass(frozen=True, slots=True)
class Blocks:
    """`elements`: inner tensors of the tensor's own shape. `items`: one-dimensional ones, with an item for each block. All
    others are the same for every part of a tensor. `shape_at`: the position of the tensor's shape in its context.
    """

    elements: frozenset[str]
    items: frozenset[str]
    shape_at: int | None = None

    def essence(self, context: Any) -> Any:
        """What must be equal for inner tensors to mean the same: all but the shape, and the dtype that the tensor shows."""
        if not isinstance(context, list):
            return context
        return [one for i, one in enumerate(context) if i != self.shape_at and not isinstance(one, torch.dtype)]

    def context(self, context: Any, shape: tuple[int, ...]) -> Any:
        """`context` for a part, or a whole, of `shape`."""
        if self.shape_at is None or not isinstance(context, list):
            return context
        return [*context[: self.shape_at], shape, *context[self.shape_at + 1 :]]


BLOCKS: Mapping[str, Blocks] = {
    "torchao.optim.subclass_8bit:OptimState8bit": Blocks(frozenset({"codes"}), frozenset({"scale"})),
    "torchao.optim.subclass_4bit:OptimState4bit": Blocks(frozenset(), frozenset({"codes", "scale"}), shape_at=1),
    "torchao.optim.subclass_fp8:OptimStateFp8": Blocks(frozenset({"codes"}), frozenset({"scale"})),
}
"""By the name of the class."""


def range_of(held: LocalShard) -> tuple[int, int] | None:
    """The range of elements that a rank holds: of whole rows, one after the other. None if they are not consecutive."""
    if not held.parts:
        return 0, 0
    part = held.parts[0]
    whole_rows = part.box.sizes[1:] == held.shape[1:] and part.row is None
    if len(held.parts) > 1 or not held.shape or not whole_rows:
        return None
    row = math.prod(held.shape[1:])
    return part.box.offsets[0] * row, (part.box.offsets[0] + part.box.sizes[0]) * row


@lru_cache(maxsize=1 << 14)
def items_held(held: LocalShard, size: int) -> LocalShard | None:
    """The items of blocks of `size` elements that belong to what `held` holds; None if they are not whole blocks."""
    found, count = range_of(held), math.prod(held.shape)
    if found is None or size < 1 or count % size or any(at % size for at in found):
        return None
    start, stop = (at // size for at in found)
    part = LocalBox((count // size,), Box((start,), (stop - start,)), (0,))
    return LocalShard((count // size,), (part,) if start < stop else (), held.replica, held.replicas)


def inner_held(
    blocks: Blocks, name: str, held: LocalShard, size: int, shape: tuple[int, ...], among: ReplicaGroup
) -> LocalShard:
    """The part that this rank holds of the inner tensor `name` of the whole tensor. ValueError if it cannot be described.

    `size`: how many elements an item of it stands for. `shape`: its shape, if it is the same for every part; `among`: the ranks
    that have it then.
    """
    if name in blocks.elements:
        return held
    if name not in blocks.items:
        return replicated(shape, among)
    found = items_held(held, size)
    if found is None:
        raise ValueError(f"this rank's part is not made of whole rows and whole blocks of {size} elements")
    return found
