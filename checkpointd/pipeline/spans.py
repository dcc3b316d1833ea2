"""Spans: what becomes one chunk each, and where the chunks of a save are found afterwards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from msgspec.structs import replace

from checkpointd.layout.manifest import Chunk, ObjectRef
from checkpointd.pipeline.shard import Bytes, ShardTensor
from checkpointd.pipeline.unchanged import Held

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
        """The first byte's place in the image."""
        return self.tensor.offset + self.start

    def of(self, image: Bytes) -> Bytes:
        return image[self.offset : self.offset + self.nbytes]


PARTS_CHUNKS = 16
"""A box of a tensor that ranks hold together is cut into about so many chunks at least: whoever reads it in another layout
needs a part of it, and reads whole chunks."""
PARTS_CHUNK_BYTES_MIN = 256 << 10
"""They are no smaller for it: each chunk costs an entry in the index, and a call for whoever reads it alone."""


def spans_of(tensors: Iterable[ShardTensor], chunk_bytes: int) -> list[Span]:
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


REFERRED_PART_MIN = 0.25
"""An older object is referred to only where at least so much of it is needed: all of it stays for that."""
UNCHANGED_PART_MIN = 0.01
"""Where less of a shard is unchanged, such as a few constants, all of it is written, and needs no older one."""


@dataclass(slots=True)
class Placed:
    """Where the spans of one save lie: in objects of its own, or, unchanged, in those of older attempts."""

    objects: list[ObjectRef] = field(default_factory=list)
    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)
    held: dict[ChunkKey, Held] = field(default_factory=dict)
    digests: dict[ChunkKey, bytes] = field(default_factory=dict)
    """Of the spans that were compared and must be written."""
    settled: set[ChunkKey] = field(default_factory=set)
    """Spans that have not changed and are written all the same."""

    def keep_worthy(self, raw_total: int) -> None:
        """Write what has not changed where it is next to nothing of `raw_total` bytes, or references to it would keep objects
        alive of which little is needed: those spans are `settled`.
        """
        needed: dict[ObjectRef, int] = defaultdict(int)
        for ref, chunk in self.held.values():
            needed[ref] += chunk.stored
        is_little = sum(chunk.raw for _, chunk in self.held.values()) < UNCHANGED_PART_MIN * raw_total
        for key, (ref, chunk) in list(self.held.items()):
            if is_little or needed[ref] < REFERRED_PART_MIN * ref.size:
                del self.held[key]
                self.digests[key] = chunk.digest
                if not is_little:
                    self.settled.add(key)

    def changed(self, spans: Iterable[Span]) -> list[Span]:
        """Those that must be written."""
        return [span for span in spans if span.key not in self.held]

    def all_objects(self) -> tuple[ObjectRef, ...]:
        """Its own objects, and behind them those that it refers to."""
        return (*self.objects, *self._older())

    def _older(self) -> list[ObjectRef]:
        return sorted({ref for ref, _ in self.held.values()}, key=lambda ref: (ref.held_by, ref.name))

    def by_key(self) -> dict[ChunkKey, Chunk]:
        """Every chunk, `object` being its position in `all_objects`."""
        positions = {ref: len(self.objects) + number for number, ref in enumerate(self._older())}
        return {**self.chunks, **{key: replace(chunk, object=positions[ref]) for key, (ref, chunk) in self.held.items()}}
