"""Stage 3 of a load: plan which chunks to read for the wanted boxes, and which part of each chunk goes to which sink.

Invariants
  READPLAN-1  A call reads a chunk at most once, even if several boxes want it, and only if a wanted box has an element in it.
  READPLAN-2  Each element of a wanted box reaches its sink exactly once, or a damage names the missing part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpointd.errors import DamagedError, FormatError, NotFoundError
from checkpointd.layout.boxes import Box, intersect, tiling_fault
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.indexes import Chunk, Index, TensorEntry
from checkpointd.layout.regions import regions, relative, slices, span, touches
from checkpointd.pipeline.read.checkpoint_view import CheckpointView, StoredBox
from checkpointd.pipeline.read.index import chunk_starts
from checkpointd.pipeline.shard import Bytes

Sink = Callable[[int, Bytes], None]
"""Takes the raw bytes of one chunk at a byte offset of its box. Runs on a thread, and must not keep the array.

If the box is contiguous host memory, pass a `ByteMemory`: chunks are then read straight into it.
"""

BoxSink = Callable[[Box, NDArray[Any]], None]
"""Takes a box inside the wanted one, in the tensor's coordinates, and its elements: an n-d array of the box's sizes.

The array may be a strided view; its dtype is an unsigned integer (or void) of the element's size. Runs on a thread, and must
not keep the array. If the wanted box is contiguous host memory, pass a `BoxMemory`: chunks are then read straight into it.
"""

CARRIERS: dict[int, np.dtype[Any]] = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"))}
CARRIERS[16] = np.dtype("V16")
"""Bytes per element -> the numpy dtype that carries elements of this size, of any dtype."""


@dataclass(frozen=True, slots=True)
class ByteMemory:
    """A sink that is host memory: `data` has the raw bytes of the box, in the order in which they are stored."""

    data: Bytes

    def __call__(self, start: int, raw: Bytes) -> None:
        np.copyto(self.data[start : start + raw.nbytes], raw)


@dataclass(frozen=True, slots=True)
class BoxMemory:
    """A sink of boxes that is host memory: `elements` is a contiguous array of carriers with the elements of `box`."""

    box: Box
    elements: NDArray[Any]

    def __call__(self, inside: Box, elements: NDArray[Any]) -> None:
        self.elements[slices(self.box, inside)] = elements

    @property
    def data(self) -> Bytes:
        """The same memory as bytes."""
        return self.elements.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a chunk's raw bytes in the memory of a sink: `nbytes` from the byte `at` of `memory`."""

    memory: Bytes
    at: int
    nbytes: int

    @property
    def data(self) -> Bytes:
        return self.memory[self.at : self.at + self.nbytes]

    def is_followed_by(self, other: Place) -> bool:
        """Whether `other` begins where this one ends."""
        return self.memory is other.memory and self.at + self.nbytes == other.at


@dataclass(frozen=True, slots=True)
class BoxRequest:
    """A box to read of the tensor `fqn`: the global tensor, or that of `rank` if given. Without a sink it is only verified."""

    fqn: str
    box: Box
    sink: BoxSink | None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to read: its object and rank, its tensor, its first byte in the box, and what gets its raw bytes.

    `place`: memory that the raw bytes are to lie in. `sinks` get them besides. Without both, the chunk is only verified.
    """

    key: str
    rank: int
    entry: TensorEntry
    chunk: Chunk
    start: int
    sinks: tuple[Sink, ...] = ()
    place: Place | None = None
    base_key: str = ""
    """The object of the base, if the chunk is a delta."""


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """The objects of `rank` by their numbers in its index: their keys."""

    rank: int
    keys: Sequence[str]

    @staticmethod
    def of(index: Index, prefix: str) -> StoredObjects:
        """Those of `index`, of the attempt `prefix`."""
        return StoredObjects(index.rank, [ref.key(prefix) for ref in index.objects])

    def read(
        self, entry: TensorEntry, chunk: Chunk, start: int, sinks: tuple[Sink, ...] = (), place: Place | None = None
    ) -> ChunkRead:
        """The read of `chunk`, which begins at the byte `start` of `entry`."""
        base_key = self.keys[chunk.base.object] if chunk.base is not None else ""
        return ChunkRead(self.keys[chunk.object], self.rank, entry, chunk, start, sinks, place, base_key)


def plan_reads(world: CheckpointView, wants: Iterable[BoxRequest]) -> tuple[list[DamagedError], Iterable[ChunkRead]]:
    """The damage of the wanted boxes that the ranks did not store whole, and the chunks that the other boxes need.

    Raises as `read_boxes` does.
    """
    gaps: list[DamagedError] = []
    reads = _ChunkReads(world)
    for want in wants:
        parts = parts_of(world, want)
        gap = _gap(want, parts)
        if gap is None:
            reads.add(want, parts)
        else:
            gaps.append(gap)
    return gaps, reads


def gaps(world: CheckpointView, wants: Iterable[BoxRequest]) -> list[DamagedError]:
    """The damage of the wanted boxes that the ranks did not store whole. Reads no chunks; raises as `read_boxes` does."""
    return [gap for want in wants if (gap := _gap(want, parts_of(world, want)))]


def unheld(view: CheckpointView, wants: Iterable[BoxRequest]) -> list[BoxRequest]:
    """The wanted boxes of global tensors that the indexes of `view` do not hold whole."""
    return [want for want in wants if want.rank is None and not _is_held(view, want)]


def _is_held(view: CheckpointView, want: BoxRequest) -> bool:
    tensor = view.tensors.get(want.fqn)
    if tensor is None:
        return False
    boxes = [part.entry.box for part in tensor.parts]
    return want.box in boxes or _gap(want, parts_of(view, want)) is None


def parts_of(world: CheckpointView, want: BoxRequest) -> list[StoredBox]:
    """The parts that have elements of the wanted box. NotFoundError if there is no such tensor."""
    found: Sequence[StoredBox]
    if want.rank is None:
        tensor = world.tensors.get(want.fqn)
        found = tensor.parts if tensor else ()
    else:
        entry = world.own(want.rank).get(want.fqn) if want.rank in world.indexes else None
        found = (StoredBox(want.rank, entry),) if entry else ()
    if not found:
        whose = "" if want.rank is None else f" of rank {want.rank}"
        raise NotFoundError(f"{world.checkpoint.tag} holds no tensor {want.fqn}{whose}")
    want.box.check(found[0].entry.shape)
    return [part for part in found if intersect(part.entry.box, want.box) is not None]


def _gap(want: BoxRequest, parts: Sequence[StoredBox]) -> DamagedError | None:
    """The damage if `parts` do not cover each element of the wanted box once; None if they do."""
    shared = [box for part in parts if (box := intersect(part.entry.box, want.box))]
    fault = tiling_fault(want.box.sizes, relative(shared, want.box))
    if fault is None:
        return None
    ranks = sorted({part.rank for part in parts})
    message = f"{want.fqn} cannot be put together from the boxes of ranks {ranks}: {fault}"
    return FormatError(message, fqn=want.fqn, rank=ranks[0] if len(ranks) == 1 else None)


@dataclass(slots=True)
class _Found:
    """A chunk that some box wants, its part, and what gets it."""

    part: StoredBox
    chunk: Chunk
    sinks: list[Sink] = field(default_factory=list)
    place: Place | None = None


class _ChunkReads:
    """The chunks to read, each once, with all its sinks."""

    def __init__(self, world: CheckpointView) -> None:
        self._world = world
        self._found: dict[tuple[int, int], _Found] = {}

    def add(self, want: BoxRequest, parts: Iterable[StoredBox]) -> None:
        for part in parts:
            memory = SharedRun.of(part.entry.box, want, ITEM_BYTES[part.entry.dtype])
            for start, chunk in _touched(part.entry, want.box):
                found = self._found.setdefault((id(part.entry), start), _Found(part, chunk))
                place = None if memory is None or found.place is not None else memory.place(start, chunk.raw)
                if place is not None:
                    found.place = place
                elif want.sink is not None:
                    found.sinks.append(_Cut(part.entry, want.box, want.sink))

    def __iter__(self) -> Iterator[ChunkRead]:
        prefix = self._world.checkpoint.prefix
        objects = {rank: StoredObjects.of(index, prefix) for rank, index in self._world.indexes.items()}
        for (_, start), found in self._found.items():
            part = found.part
            yield objects[part.rank].read(part.entry, found.chunk, start, tuple(found.sinks), found.place)


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Bytes that lie in one run both in a stored box and in the memory of a wanted one.

    They are the bytes `[start, stop)` of the stored box, and begin at the byte `at` of `memory`.
    """

    memory: Bytes
    start: int
    stop: int
    at: int

    @staticmethod
    def of(box: Box, want: BoxRequest, itemsize: int) -> SharedRun | None:
        """The run that the stored `box` and `want` share; None if they share no element, or not in one run."""
        shared = intersect(box, want.box)
        if not isinstance(want.sink, BoxMemory) or want.sink.box != want.box or shared is None:
            return None
        there, here = span(box, want.box), span(want.box, box)
        if not len(there) == len(here) == shared.numel():
            return None
        return SharedRun(want.sink.data, there.start * itemsize, there.stop * itemsize, here.start * itemsize)

    def place(self, start: int, nbytes: int) -> Place | None:
        """The place of `nbytes` from the byte `start` of the stored box on; None if the run does not hold all of them."""
        if start < self.start or start + nbytes > self.stop:
            return None
        return Place(self.memory, self.at + start - self.start, nbytes)


def _touched(entry: TensorEntry, wanted: Box) -> Iterator[tuple[int, Chunk]]:
    """The chunks of `entry` that hold an element of `wanted`, each with its first byte in the box."""
    item, reach = ITEM_BYTES[entry.dtype], span(entry.box, wanted)
    for start, chunk in chunk_starts(entry):
        first, last = start // item, (start + chunk.raw) // item
        if last > reach.start and first < reach.stop and touches(entry.box, first, last, wanted):
            yield start, chunk


@dataclass(frozen=True, slots=True)
class _Cut:
    """A sink of chunks that passes the wanted elements on to a sink of boxes."""

    entry: TensorEntry
    wanted: Box
    sink: BoxSink

    def __call__(self, start: int, raw: Bytes) -> None:
        item = ITEM_BYTES[self.entry.dtype]
        run, first = raw.view(CARRIERS[item]), start // item
        for region in regions(self.entry.box, first, first + run.size, self.wanted):
            self.sink(region.box, region.of(run))


def rank_reads(prefix: str, index: Index, sinks: Mapping[str, Sink | None] | None = None) -> list[ChunkRead]:
    """The chunks of one rank's tensors named in `sinks`; a sink of None only verifies. Without `sinks`: all chunks, to
    verify."""
    objects = StoredObjects.of(index, prefix)
    return [
        _read_for(objects, entry, chunk, start, sink)
        for entry in index.tensors
        if sinks is None or entry.fqn in sinks
        for sink in (None if sinks is None else sinks[entry.fqn],)
        for start, chunk in chunk_starts(entry)
    ]


def _read_for(objects: StoredObjects, entry: TensorEntry, chunk: Chunk, start: int, sink: Sink | None) -> ChunkRead:
    if isinstance(sink, ByteMemory):
        return objects.read(entry, chunk, start, (), Place(sink.data, start, chunk.raw))
    return objects.read(entry, chunk, start, (sink,) if sink else ())
