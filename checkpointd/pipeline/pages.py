"""Page-aligned memory and runs of pages, so that raw tensors go from the slot to the disk without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checkpointd.pipeline.shard import PAGE, Bytes


def page_buffer(size: int) -> Bytes:
    """`size` bytes of zeroed, page-aligned memory of its own."""
    return np.frombuffer(mmap.mmap(-1, max(size, PAGE)), dtype=np.uint8)[:size]


def page_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class BufferRange(Protocol):
    """A tensor, or a part of one: `nbytes` bytes from byte `offset` of the buffer on."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PageRun:
    """Whole pages `[start, stop)` of the image that are stored from byte `base` of the raw object on."""

    start: int
    stop: int
    base: int


def runs_of(pieces: Iterable[BufferRange]) -> list[PageRun]:
    """The pages that hold the given pieces, neighbours merged, laid out back to back in the object."""
    runs: list[PageRun] = []
    for piece in sorted((p for p in pieces if p.nbytes), key=lambda p: p.offset):
        start, stop = piece.offset // PAGE * PAGE, page_up(piece.offset + piece.nbytes)
        if runs and start <= runs[-1].stop:
            last = runs.pop()
            runs.append(PageRun(last.start, max(last.stop, stop), last.base))
        else:
            at = runs[-1].base + runs[-1].stop - runs[-1].start if runs else 0
            runs.append(PageRun(start, stop, at))
    return runs


def locate(runs: list[PageRun], offset: int) -> int:
    """Where byte `offset` of the buffer lies in the raw object."""
    low, high = 0, len(runs)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs[middle].start <= offset else (low, middle)
    return runs[low].base + offset - runs[low].start
