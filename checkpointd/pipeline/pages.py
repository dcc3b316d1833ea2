"""Page-aligned memory and runs of pages, so that raw tensors go from the slot to the disk without a copy."""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checkpointd.pipeline.shard import PAGE, Bytes


def page_buffer(size: int) -> Bytes:
    """`size` bytes of new, zeroed, page-aligned memory."""
    return np.frombuffer(mmap.mmap(-1, max(size, PAGE)), dtype=np.uint8)[:size]


def up_to(size: int, unit: int) -> int:
    """`size`, rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def page_up(size: int) -> int:
    return up_to(size, PAGE)


class BufferRange(Protocol):
    """A tensor, or a part of a tensor: `nbytes` bytes from byte `offset` of the buffer on."""

    @property
    def offset(self) -> int: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PageRun:
    """Whole pages `[start, stop)` of the buffer that are stored from byte `base` of the raw object on."""

    start: int
    stop: int
    base: int


def runs_of(pieces: Iterable[BufferRange]) -> list[PageRun]:
    """The pages that hold `pieces`, as runs that follow each other in the object. Neighbouring runs are merged."""
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
    """The place of byte `offset` of the buffer in the raw object."""
    run = runs[bisect_right(runs, offset, key=lambda run: run.start) - 1]
    return run.base + offset - run.start
