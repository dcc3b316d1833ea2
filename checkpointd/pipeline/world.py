"""What all ranks of a checkpoint stored, as the tensors that it is about; and any box of them read, whoever wrote what.

Invariants
  W1  A chunk is read at most once in a call, however many boxes want it, and only where a wanted box has an element of it.
  W2  Each element of a wanted box reaches its sink exactly once, or a damage names what is missing.
  L1 to L3 of `load.py` hold here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, FormatError, NotFoundError
from checkpointd.layout.boxes import Box, intersect, tiling_fault
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.manifest import Chunk, Index, TensorEntry
from checkpointd.layout.regions import regions, relative, span, touches
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.load import Sink, Wanted, chunk_starts, entries_by_fqn, object_key, read_chunks, read_index
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store

BoxSink = Callable[[Box, NDArray[Any]], None]
"""Takes a box inside the wanted one, in the tensor's coordinates, and its elements: an n-d array of the box's sizes.

The array may be a strided view; its dtype is an unsigned integer (or void) of the element's size. Runs on a thread; keeps
nothing of what it is given.
"""

CARRIERS: dict[int, np.dtype[Any]] = {size: np.dtype(name) for size, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"))}
CARRIERS[16] = np.dtype("V16")
"""Bytes per element -> the numpy dtype that carries such elements, whatever they mean."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a global tensor as one rank stored it."""

    rank: int
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor that the ranks hold together; `parts` are its boxes, by rank, empty ones included.

    A box that several ranks stored stands there once, as the first of them stored it: a commit means that all hold the same.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class World:
    """All indexes of a checkpoint by rank."""

    checkpoint: Checkpoint
    indexes: Mapping[int, Index]

    @cached_property
    def tensors(self) -> Mapping[str, GlobalTensor]:
        """The tensors of scope global by FQN, as first met. FormatError where ranks disagree on what one is."""
        return global_tensors(self.indexes)

    def own(self, rank: int) -> Mapping[str, TensorEntry]:
        """The tensors of scope rank that `rank` stored, by FQN. FormatError where one lies there in part."""
        if rank not in self._own:
            index = self.indexes[rank]
            kept = tuple(entry for entry in index.tensors if entry.scope == "rank")
            self._own[rank] = entries_by_fqn(msgspec.structs.replace(index, tensors=kept))
        return self._own[rank]

    @cached_property
    def _own(self) -> dict[int, dict[str, TensorEntry]]:
        return {}


@dataclass(frozen=True, slots=True)
class Want:
    """A box to read, of the global tensor `fqn`, or of that rank's own where `rank` is given. Without a sink: only verify."""

    fqn: str
    box: Box
    sink: BoxSink | None
    rank: int | None = None


async def read_world(store: Store, checkpoint: Checkpoint, config: LoadConfig) -> World:
    """The indexes of all ranks, each verified along the chain of digests, as many at once as `config.reads`.

    DamagedError where one cannot be trusted, or where ranks disagree on a tensor.
    """
    found: dict[int, Index] = {}

    async def read(rank: int) -> None:
        found[rank] = await read_index(store, checkpoint, rank)

    ranks = range(checkpoint.outcome.world_size)
    await run_workers([partial(read, rank) for rank in ranks], config.reads, lambda: None)
    world = World(checkpoint, {rank: found[rank] for rank in ranks})
    _ = world.tensors
    return world


def global_tensors(indexes: Mapping[int, Index]) -> dict[str, GlobalTensor]:
    """The tensors of scope global of `indexes` by FQN. FormatError where two ranks give one another dtype or shape."""
    parts: dict[str, list[Part]] = {}
    for rank, index in indexes.items():
        for entry in index.tensors:
            if entry.scope == "global":
                parts.setdefault(entry.fqn, []).append(Part(rank, entry))
    return {fqn: _tensor(fqn, found) for fqn, found in parts.items()}


def _tensor(fqn: str, parts: list[Part]) -> GlobalTensor:
    first = parts[0].entry
    for part in parts:
        entry = part.entry
        if (entry.dtype, entry.shape) != (first.dtype, first.shape):
            raise FormatError(
                f"{fqn} is {first.dtype}{list(first.shape)} on rank {parts[0].rank} "
                f"and {entry.dtype}{list(entry.shape)} on rank {part.rank}",
                fqn=fqn,
                rank=part.rank,
            )
    once: dict[object, Part] = {}
    for number, part in enumerate(parts):
        once.setdefault(part.entry.box if part.entry.chunks else number, part)
    return GlobalTensor(fqn, first.dtype, first.shape, tuple(once.values()))


async def read_boxes(
    store: Store,
    world: World,
    wants: Iterable[Want],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[DamagedError]:
    """Read the chunks that the wanted boxes touch, verify each, and hand every sink its elements, in any order.

    Returns every damage found: boxes that no rank stored whole, of which nothing is read, then chunks in the order of the
    objects; chunks that are whole were handed over all the same. Raises NotFoundError where a tensor or a rank does not exist,
    FormatError where a box does not lie in its tensor, StoreError where the storage fails.
    """
    gaps, wanted = plan_reads(world, wants)
    return gaps + await read_chunks(store, wanted, config, on_bytes)


def plan_reads(world: World, wants: Iterable[Want]) -> tuple[list[DamagedError], Iterable[Wanted]]:
    """What of `wants` no rank stored whole, and the chunks that the others need; raises as `read_boxes` does."""
    gaps: list[DamagedError] = []
    reads = _Reads(world)
    for want in wants:
        parts = _parts(world, want)
        gap = _gap(want, parts)
        if gap is None:
            reads.add(want, parts)
        else:
            gaps.append(gap)
    return gaps, reads


def gaps(world: World, wants: Iterable[Want]) -> list[DamagedError]:
    """What of `wants` no rank stored whole, without reading; raises what `read_boxes` raises for boxes that cannot be."""
    return [gap for want in wants if (gap := _gap(want, _parts(world, want)))]


def _parts(world: World, want: Want) -> list[Part]:
    """The parts that have elements of the wanted box."""
    found: Sequence[Part]
    if want.rank is None:
        tensor = world.tensors.get(want.fqn)
        found = tensor.parts if tensor else ()
    else:
        entry = world.own(want.rank).get(want.fqn) if want.rank in world.indexes else None
        found = (Part(want.rank, entry),) if entry else ()
    if not found:
        whose = "" if want.rank is None else f" of rank {want.rank}"
        raise NotFoundError(f"{world.checkpoint.tag} holds no tensor {want.fqn}{whose}")
    want.box.check(found[0].entry.shape)
    return [part for part in found if intersect(part.entry.box, want.box) is not None]


def _gap(want: Want, parts: Sequence[Part]) -> DamagedError | None:
    """What keeps `parts` from being the wanted box, each element once."""
    shared = [box for part in parts if (box := intersect(part.entry.box, want.box))]
    fault = tiling_fault(want.box.sizes, relative(shared, want.box))
    if fault is None:
        return None
    ranks = sorted({part.rank for part in parts})
    message = f"{want.fqn} cannot be put together from what ranks {ranks} stored: {fault}"
    return FormatError(message, fqn=want.fqn, rank=ranks[0] if len(ranks) == 1 else None)


class _Reads:
    """The chunks to read, each once, with everybody who wants it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._found: dict[tuple[int, int], tuple[Part, Chunk, list[Sink]]] = {}

    def add(self, want: Want, parts: Iterable[Part]) -> None:
        for part in parts:
            for start, chunk in _touched(part.entry, want.box):
                _, _, sinks = self._found.setdefault((id(part.entry), start), (part, chunk, []))
                if want.sink is not None:
                    sinks.append(_Cut(part.entry, want.box, want.sink))

    def __iter__(self) -> Iterator[Wanted]:
        prefix = self._world.checkpoint.prefix
        for (_, start), (part, chunk, sinks) in self._found.items():
            key = object_key(prefix, self._world.indexes[part.rank].objects[chunk.object])
            yield Wanted(key, part.rank, part.entry, chunk, start, tuple(sinks))


def _touched(entry: TensorEntry, wanted: Box) -> Iterator[tuple[int, Chunk]]:
    """The chunks of `entry` that hold an element of `wanted`, each with its first byte in the box."""
    item, reach = ITEM_BYTES[entry.dtype], span(entry.box, wanted)
    for start, chunk in chunk_starts(entry):
        first, last = start // item, (start + chunk.raw) // item
        if last > reach.start and first < reach.stop and touches(entry.box, first, last, wanted):
            yield start, chunk


@dataclass(frozen=True, slots=True)
class _Cut:
    """A sink of chunks that gives a sink of boxes what it wants of them."""

    entry: TensorEntry
    wanted: Box
    sink: BoxSink

    def __call__(self, start: int, raw: Bytes) -> None:
        item = ITEM_BYTES[self.entry.dtype]
        run, first = raw.view(CARRIERS[item]), start // item
        for region in regions(self.entry.box, first, first + run.size, self.wanted):
            self.sink(region.box, region.of(run))
