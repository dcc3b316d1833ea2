"""Local shards that integrations describe: flat ranges of a global tensor, and replicas of a tensor.

A flat range of the row-major elements of a tensor (a ZeRO partition of a parameter) is at most 2*ndim-1 boxes of it. So it is
stored as parts of the tensor itself, and can be loaded into any other split of that tensor.

Invariants (those of `dtensor.py` hold too)
  FLAT-1  A range contains only elements of its tensor, no padding.
  FLAT-2  A LocalShardTensor at several places of a state is one tensor with several names, on every rank, even on a rank that
      holds no element of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from checkpointd.layout.boxes import Box, boxes_of_range
from checkpointd_client.sharding.dtensor import ALONE, LocalBox, LocalShard, ReplicaGroup, replicated


@dataclass(frozen=True, eq=False, slots=True)
class LocalShardTensor:
    """A value that a state may contain: `tensor` is this rank's memory for its local shard `held` of a global tensor.

    `optimizer_only`: only optimizer steps change it, so it can be copied while training goes on.
    `trained`: whether the global tensor requires gradients, even if `tensor` does not.
    """

    tensor: torch.Tensor
    held: LocalShard
    optimizer_only: bool = False
    trained: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class MultiTarget:
    """For a load: one stored tensor fills all of `places`, each in its own dtype."""

    places: tuple[LocalShardTensor, ...]


@dataclass(frozen=True, slots=True)
class FlatPart(LocalBox):
    """A box whose elements are contiguous in a one-dimensional local tensor, from the index in `at` on; column by column with
    `by_columns`.
    """

    by_columns: bool = False

    def of(self, local: torch.Tensor) -> torch.Tensor:
        elements = local[self.at[0] : self.at[0] + self.box.numel()]
        return elements.view(self.box.sizes[::-1]).t() if self.by_columns else elements.view(self.box.sizes)


def flat(
    shape: tuple[int, ...],
    start: int,
    elements: torch.Tensor,
    *,
    optimizer_only: bool = False,
    trained: bool = False,
    by_columns: bool = False,
) -> LocalShardTensor:
    """A range of the row-major elements of a tensor of `shape`: the one-dimensional `elements`, from element `start` on. With
    `by_columns`, the elements of a matrix are counted column by column.

    Ranks with other ranges of the tensor use the same FQN. A rank without elements passes an empty tensor. ValueError if the
    range does not lie inside the tensor.
    """
    count = elements.numel()
    if elements.dim() != 1:
        raise ValueError(f"a flat range has one dimension, not the shape {list(elements.shape)}")
    if start == 0 and count == math.prod(shape):
        whole = elements.view(shape[::-1]).t() if by_columns else elements.view(shape)
        return LocalShardTensor(whole, replicated(shape, ALONE), optimizer_only, trained)
    return LocalShardTensor(elements, flat_held(shape, start, count, by_columns=by_columns), optimizer_only, trained)


def same(
    tensor: torch.Tensor,
    group: ReplicaGroup,
    *,
    first_writes: bool = False,
    optimizer_only: bool = False,
    trained: bool = False,
) -> LocalShardTensor:
    """A tensor that every rank of `group` holds whole; with `first_writes`, the values of the group's first rank count."""
    return LocalShardTensor(tensor, replicated(tuple(tensor.shape), group, first_writes=first_writes), optimizer_only, trained)


@lru_cache(maxsize=1 << 16)
def flat_held(shape: tuple[int, ...], start: int, count: int, *, by_columns: bool = False) -> LocalShard:
    """The range as boxes, each with its place in the range. Cached, because every save asks for the same ranges."""
    parts: list[LocalBox] = []
    at = 0
    for box in boxes_of_range(shape[::-1] if by_columns else shape, start, start + count):
        own = Box(box.offsets[::-1], box.sizes[::-1]) if by_columns else box
        parts.append(FlatPart(shape, own, (at,), by_columns=by_columns))
        at += box.numel()
    return LocalShard(shape, tuple(parts))
