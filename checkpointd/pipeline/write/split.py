"""Stage 1 of a save: split the tensors of a shard into spans, each of which becomes one chunk."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from checkpointd.pipeline.shard import Bytes, ShardTensor

ChunkKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one chunk: `nbytes` bytes of `tensor` from its byte `start` on."""

    tensor: ShardTensor
    start: int
    nbytes: int

    @property
    def key(self) -> ChunkKey:
        return (self.tensor.fqn, self.tensor.offset, self.start)

    @property
    def offset(self) -> int:
        """The first byte's place in the buffer."""
        return self.tensor.offset + self.start

    def of(self, buffer: Bytes) -> Bytes:
        return buffer[self.offset : self.offset + self.nbytes]


PARTS_CHUNKS = 16
"""A box of a tensor that ranks hold together is split into at least about this many chunks. A load in another layout needs only
a part of the box, but reads whole chunks."""
PARTS_CHUNK_BYTES_MIN = 256 << 10
"""Such chunks are not smaller than this, since each costs an entry in the index, and perhaps a read of its own."""


def split(tensors: Iterable[ShardTensor], chunk_bytes: int) -> list[Span]:
    """The chunks of `tensors` in order: whole elements, at most `chunk_bytes` each."""
    spans = []
    for tensor in tensors:
        step = _chunk_bytes(tensor, chunk_bytes)
        spans += [Span(tensor, start, min(step, tensor.nbytes - start)) for start in range(0, tensor.nbytes, step)]
    return spans


class Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


S = TypeVar("S", bound=Sized)


def _chunk_bytes(tensor: ShardTensor, chunk_bytes: int) -> int:
    """The chunk size for `tensor`. A tensor that ranks hold together is split between rows if the rows are short enough."""
    unit = tensor.itemsize
    if tensor.scope == "global":
        chunk_bytes = min(chunk_bytes, max(tensor.nbytes // PARTS_CHUNKS, PARTS_CHUNK_BYTES_MIN))
        row_bytes = math.prod(tensor.box.sizes[1:]) * unit
        unit = row_bytes if 0 < row_bytes <= chunk_bytes else unit
    return max(chunk_bytes // unit, 1) * unit


def grouped(spans: Iterable[S], nbytes: int) -> list[list[S]]:
    """Groups of consecutive spans of about `nbytes` each."""
    groups: list[list[S]] = []
    filled = nbytes
    for span in spans:
        if filled >= nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(span)
        filled += span.nbytes
    return groups
