"""Strides of row-major tensors, and the check that an alias stays inside its owner's memory. All counts are elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

from checkpointd.errors import FormatError
from checkpointd.layout.indexes import Alias


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


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
