"""Strides of tensors whose elements fill their memory, and the check that an alias stays inside its owner. All counts are
elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from checkpointd.errors import FormatError
from checkpointd.layout.indexes import Alias


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor of `shape`."""
    return _row_major(tuple(shape))


@lru_cache(maxsize=1 << 12)
def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def stride_in_order_of(stride: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor of `shape` that fills its memory with its dimensions in the order in which `stride` has them."""
    made, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):
        made[dim] = step
        step *= max(shape[dim], 1)
    return tuple(made)


def check_dense(fqn: str, stride: Sequence[int], shape: Sequence[int]) -> None:
    """Raise FormatError unless the elements of a tensor with these strides fill its memory, each at a place of its own."""
    fits, step = len(stride) == len(shape) and min(stride, default=0) >= 0, 1
    for own, size in sorted((s, n) for n, s in zip(shape, stride, strict=False) if n > 1):
        fits = fits and (own == step or 0 in shape)
        step *= size
    if not fits:
        raise FormatError(f"{fqn} has the strides {list(stride)}, which a tensor of shape {list(shape)} cannot have", fqn=fqn)


def end_of(shape: Sequence[int], stride: Sequence[int], offset: int) -> int:
    """The place after the last element."""
    if 0 in shape:
        return offset
    return offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1


def check_alias(alias: Alias, shape: Sequence[int]) -> None:
    """Raise FormatError unless `alias` lies inside its owner, which has `shape`."""
    sane = len(alias.shape) == len(alias.stride) and min((*alias.shape, *alias.stride, alias.offset), default=0) >= 0
    if not sane or end_of(alias.shape, alias.stride, alias.offset) > math.prod(shape):
        raise FormatError(f"{alias.fqn} shares memory outside {alias.owner}", fqn=alias.fqn)
