"""Tensors in memory of another shape than their own: flat ranges of a global tensor, and replicas of one.

A flat range of the row-major elements of a tensor (a ZeRO partition of a parameter) is at most 2*ndim-1 boxes of it. So what is
stored of it is a part of the tensor itself, and its rows can go to any other split of that tensor.

Invariants (those of `dtensor.py` hold too)
  FLAT-1  A range holds elements of its tensor alone: what pads it stays with whoever made it.
  FLAT-2  One HeldTensor at several places of a state is one tensor with several names, on every rank, also where it holds
      nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from checkpointd.layout.boxes import boxes_of_range
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard, ReplicaGroup, replicated


@dataclass(frozen=True, eq=False, slots=True)
class LocalShardTensor:
    """A value that a state may hold: this rank's memory for `held`, its part of a tensor that ranks hold together.

    `optimizer_only`: nothing but steps of an optimizer changes it, so that it can be copied while training goes on.
    `trained`: whether it is a tensor that requires gradients, whatever its memory says.
    """

    tensor: torch.Tensor
    held: LocalShard
    optimizer_only: bool = False
    trained: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class MultiTarget:
    """For a load: every one of these is filled from the one stored tensor, each in its own dtype."""

    places: tuple[LocalShardTensor, ...]


@dataclass(frozen=True, slots=True)
class FlatPart(LocalBox):
    """A box whose elements lie in a row in a local tensor of one dimension, from the only index in `at` on."""

    def of(self, local: torch.Tensor) -> torch.Tensor:
        return local[self.at[0] : self.at[0] + self.box.numel()].view(self.box.sizes)


def flat(
    shape: tuple[int, ...], start: int, elements: torch.Tensor, *, optimizer_only: bool = False, trained: bool = False
) -> LocalShardTensor:
    """The elements from `start` on, row by row, of a tensor of `shape`: all of `elements`, which has one dimension.

    Ranks that hold other ranges of it name it alike; one that holds nothing gives no elements. ValueError where the range does
    not lie inside the tensor.
    """
    count = elements.numel()
    if elements.dim() != 1:
        raise ValueError(f"a flat range has one dimension, not the shape {list(elements.shape)}")
    if start == 0 and count == math.prod(shape):
        return LocalShardTensor(elements.view(shape), replicated(shape, _ALONE), optimizer_only, trained)
    return LocalShardTensor(elements, flat_held(shape, start, count), optimizer_only, trained)


def same(
    tensor: torch.Tensor,
    group: ReplicaGroup,
    *,
    first_writes: bool = False,
    optimizer_only: bool = False,
    trained: bool = False,
) -> LocalShardTensor:
    """A tensor of which every rank of `group` holds the same; with `first_writes`, what the first one holds counts."""
    return LocalShardTensor(tensor, replicated(tuple(tensor.shape), group, first_writes=first_writes), optimizer_only, trained)


_ALONE = ReplicaGroup(0, 1)


@lru_cache(maxsize=1 << 16)
def flat_held(shape: tuple[int, ...], start: int, count: int) -> LocalShard:
    """The range as boxes, each with where it begins in the range. Cached, as every save asks for the same."""
    parts: list[LocalBox] = []
    at = 0
    for box in boxes_of_range(shape, start, start + count):
        parts.append(FlatPart(shape, box, (at,)))
        at += box.numel()
    return LocalShard(shape, tuple(parts))
