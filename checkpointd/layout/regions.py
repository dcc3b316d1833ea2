"""Regions: the elements of a wanted box that lie in a run of another box's row-major elements, and where they are in the run.

A chunk holds a run of a stored box; a reader wants another box of the same tensor. A run is at most 2*ndim-1 boxes
(`boxes_of_range`), each contiguous in the run, so the wanted elements are at most as many n-d slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from checkpointd.layout.boxes import Box, boxes_of_range, intersect


@dataclass(frozen=True, slots=True)
class Region:
    """The wanted elements of a run.

    `box` is their place in the tensor. In the run, an array of `sizes` begins at element `start`, and `cut` slices them out.
    """

    box: Box
    start: int
    sizes: tuple[int, ...]
    cut: tuple[slice, ...]

    def of(self, run: NDArray[Any]) -> NDArray[Any]:
        """The elements as an n-d array of the sizes of `box`: a view of the 1-d array `run`."""
        stop = self.start + math.prod(self.sizes)
        # With the ellipsis, indexing a 0-d array returns an array and not a scalar.
        index: tuple[Any, ...] = (*self.cut, ...)
        found: NDArray[Any] = run[self.start : stop].reshape(self.sizes)[index]
        return found


def sub_boxes(box: Box, start: int, stop: int) -> list[Box]:
    """The elements `[start, stop)` of `box`, counted row-major in `box`, as boxes of the tensor, in order."""
    return [_shifted(part, box.offsets) for part in boxes_of_range(box.sizes, start, stop)]


def regions(box: Box, start: int, stop: int, wanted: Box) -> Iterator[Region]:
    """The elements of `wanted` in the run `[start, stop)` of the row-major elements of `box`, each exactly once."""
    at = 0
    for part in sub_boxes(box, start, stop):
        shared = intersect(part, wanted)
        if shared is not None:
            yield Region(shared, at, part.sizes, slices(part, shared))
        at += part.numel()


def slices(outer: Box, inner: Box) -> tuple[slice, ...]:
    """The slices of the box `inner` in an array that holds the box `outer`, which contains `inner`."""
    starts = [i - o for i, o in zip(inner.offsets, outer.offsets, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.sizes, strict=True))


def touches(box: Box, start: int, stop: int, wanted: Box) -> bool:
    """Whether any element of the run `[start, stop)` of `box` lies in `wanted`."""
    return next(regions(box, start, stop, wanted), None) is not None


def span(box: Box, wanted: Box) -> range:
    """The shortest run of `box`, counted row-major in `box`, that holds all its elements of `wanted`."""
    shared = intersect(box, wanted)
    if shared is None:
        return range(0)
    first = last = 0
    for place, count, offset, size in zip(shared.offsets, shared.sizes, box.offsets, box.sizes, strict=True):
        first = first * size + place - offset
        last = last * size + place - offset + count - 1
    return range(first, last + 1)


def relative(boxes: Sequence[Box], frame: Box) -> list[Box]:
    """`boxes` with offsets from the first element of `frame`."""
    back = tuple(-offset for offset in frame.offsets)
    return [_shifted(box, back) for box in boxes]


def _shifted(box: Box, by: Sequence[int]) -> Box:
    return Box(tuple(o + d for o, d in zip(box.offsets, by, strict=True)), box.sizes)
