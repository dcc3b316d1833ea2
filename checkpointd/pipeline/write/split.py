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
    """What becomes one chunk: `nbytes` bytes of `tensor` from its byte `start` on."""

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
"""A box of a tensor that ranks hold together is cut into about so many chunks at least: whoever reads it in another layout
needs a part of it, and reads whole chunks."""
PARTS_CHUNK_BYTES_MIN = 256 << 10
"""They are no smaller for it: each chunk costs an entry in the index, and a call for whoever reads it alone."""


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
    """How large the chunks of `tensor` are: what ranks hold together is cut between rows, where these are short enough."""
    unit = tensor.itemsize
    if tensor.scope == "global":
        chunk_bytes = min(chunk_bytes, max(tensor.nbytes // PARTS_CHUNKS, PARTS_CHUNK_BYTES_MIN))
        row_bytes = math.prod(tensor.box.sizes[1:]) * unit
        unit = row_bytes if 0 < row_bytes <= chunk_bytes else unit
    return max(chunk_bytes // unit, 1) * unit


def grouped(spans: Iterable[S], nbytes: int) -> list[list[S]]:
    """Spans in lots of about `nbytes`, in their order."""
    groups: list[list[S]] = []
    filled = nbytes
    for span in spans:
        if filled >= nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(span)
        filled += span.nbytes
    return groups
