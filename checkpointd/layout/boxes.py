"""Boxes: n-d rectangles of a global tensor, the only description of a part of a tensor.

A flat range (a ZeRO partition, an FSDP1 flat parameter) is split into at most 2*ndim-1 boxes by `boxes_of_range`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec

from checkpointd.errors import FormatError

NDIM_MAX = 1000
"""More dimensions than any tensor has. The limit bounds the time to multiply the sizes of a hostile shape, which grows with the
square of their number."""


PerDimension = Annotated[tuple[int, ...], msgspec.Meta(max_length=NDIM_MAX)]
"""One number for each dimension. The decoder refuses a longer list before it takes memory for it."""


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rectangle `[offsets, offsets + sizes)` of a global tensor, in elements."""

    offsets: PerDimension
    sizes: PerDimension

    def numel(self) -> int:
        return math.prod(self.sizes)

    def check(self, shape: Sequence[int]) -> None:
        """Raise FormatError unless this box lies inside a tensor of `shape`."""
        if len(shape) > NDIM_MAX:
            raise FormatError(f"a tensor cannot have {len(shape)} dimensions: {NDIM_MAX} are the limit")
        if not self._fits(shape):
            raise FormatError(f"box {self.offsets}+{self.sizes} does not lie inside shape {tuple(shape)}")

    def _fits(self, shape: Sequence[int]) -> bool:
        if not len(self.offsets) == len(self.sizes) == len(shape):
            return False
        for offset, size, extent in zip(self.offsets, self.sizes, shape, strict=True):
            if offset < 0 or size < 0 or offset + size > extent:
                return False
        return True


def whole(shape: Sequence[int]) -> Box:
    """The box that covers the whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None if they share no element."""
    offsets: list[int] = []
    sizes: list[int] = []
    # A loop without generators, since a load of many tensors spends most of its planning here.
    for x, m, y, n in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        offset, end_a, end_b = x if x > y else y, x + m, y + n
        size = (end_a if end_a < end_b else end_b) - offset
        if size <= 0:
            return None
        offsets.append(offset)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Split elements `[start, stop)` of the row-major tensor of `shape` into at most 2*ndim-1 boxes, in order."""
    total = math.prod(shape)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"range [{start}, {stop}) does not lie inside {total} elements")
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    return list(_split(tuple(shape), start, stop))


def _split(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    if first == last:
        for box in _split(shape[1:], start - first * inner, stop - first * inner):
            yield Box((first, *box.offsets), (1, *box.sizes))
        return
    if start % inner:
        yield from _split(shape, start, (first + 1) * inner)
        first += 1
    full_end = stop // inner
    if full_end > first:
        yield Box((first, *(0,) * (len(shape) - 1)), (full_end - first, *shape[1:]))
    if stop % inner:
        yield from _split(shape, full_end * inner, stop)


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why `boxes` do not cover every element of `shape` exactly once, in words; None if they do.

    Sorts along one dimension and compares only boxes that overlap there. The time is linear in the number of boxes if the
    tensor is sharded on one dimension, and quadratic only for boxes that overlap in that dimension.
    """
    try:
        for box in boxes:
            box.check(shape)
    except FormatError as error:
        return str(error)
    filled = [b for b in boxes if b.numel() > 0]
    covered, total = sum(b.numel() for b in filled), math.prod(shape)
    if not shape and len(filled) > 1:
        return f"the one element is written {len(filled)} times"
    overlap = _first_overlap(filled) if shape else None
    if overlap:
        a, b = overlap
        return f"boxes {a.offsets}+{a.sizes} and {b.offsets}+{b.sizes} overlap"
    if covered != total:
        return f"{total - covered} of {total} elements are written by no rank"
    return None


def _first_overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    if not boxes:
        return None
    # The dimension with the most different offsets separates the boxes best.
    dim = max(range(len(boxes[0].offsets)), key=lambda d: len({box.offsets[d] for box in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        active = [a for a in active if a.offsets[dim] + a.sizes[dim] > box.offsets[dim]]
        for other in active:
            if intersect(box, other):
                return other, box
        active.append(box)
    return None
