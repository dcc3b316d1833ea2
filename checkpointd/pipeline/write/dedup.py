"""Deduplication: finds chunks that did not change since this rank's newest known checkpoint, and refers to them.

Invariants
  DEDUP-1  A reference names the attempt that holds the bytes: what a base itself only refers to is passed on, never chained.
  DEDUP-2  A chunk is referred to only where its place (FQN, dtype, shape, box, scope, first byte), its raw length and its
      digest are those of the base, a shard of an attempt that was seen committed, durably.
  DEDUP-3  A vote stands on references only where, after the index that names them was durable, each of the objects was found
      there and not condemned by a mark of its attempt. Whoever collects condemns, durably, before it looks for indexes, and
      removes only what none names (COLLECT-6 in `collect.py`). So one of the two sees the other, whatever runs at the same
      time: another collection, a save of the same tag, retention, a newer epoch's recovery, another writer. Which checkpoint
      the references were taken from does not matter then; it may be gone.
  DEDUP-4  What was read back and found damaged is no base any more. What an earlier process wrote is read and verified before
      the first vote that stands on references to it. It may be damaged, which is what jobs are restarted for: every checkpoint
      from then on would be damaged in the same place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from checkpointd.commit.facts import Order
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, FormatError, NotFoundError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import DAMAGED, OUTCOME, mark_number
from checkpointd.layout.manifest import Chunk, Index, ObjectRef, Scope, TensorEntry, Trained
from checkpointd.pipeline.read.chunks import read_chunks
from checkpointd.pipeline.read.index import chunk_starts, read_index
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.marks import standing_mark
from checkpointd.pipeline.shard import AttemptInfo, ShardTensor
from checkpointd.pipeline.workers import aside
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

Part = tuple[str, str, tuple[int, ...], Box, Scope]
Held = tuple[ObjectRef, Chunk]
"""A chunk, and the object that holds it, which names its attempt."""


def _part(tensor: TensorEntry | ShardTensor) -> Part:
    return (tensor.fqn, tensor.dtype, tensor.shape, tensor.box, tensor.scope)


@dataclass(frozen=True, slots=True)
class Base:
    """One rank's shard of a checkpoint: what unchanged chunks of a later save may refer to."""

    prefix: str
    order: Order
    step: int
    objects: tuple[ObjectRef, ...]
    chunks: Mapping[Part, Mapping[int, Chunk]]
    """By part, by the chunk's first byte in it."""
    is_read: bool = True
    """Whether this process wrote what it holds, or has read it (DEDUP-4)."""

    @staticmethod
    def of(index: Index, order: Order, *, is_read: bool = True) -> Base:
        """The base that a committed `index` makes."""
        prefix = f"{index.tag}/{index.attempt}"
        objects = tuple(
            ref if ref.held_by else ObjectRef(name=ref.name, size=ref.size, held_by=prefix) for ref in index.objects
        )
        chunks = {_part(entry): _by_start(entry) for entry in index.tensors}
        return Base(prefix, order, index.step, objects, chunks, is_read)

    def held(self, tensor: ShardTensor, start: int, nbytes: int) -> Held | None:
        """What was there at the place of the `nbytes` bytes of `tensor` from `start` on; None where nothing of that length."""
        chunk = self.chunks.get(_part(tensor), {}).get(start)
        if chunk is None or chunk.raw != nbytes:
            return None
        return self.objects[chunk.object], chunk


def _by_start(entry: TensorEntry) -> dict[int, Chunk]:
    starts = accumulate((chunk.raw for chunk in entry.chunks), initial=0)
    return dict(zip(starts, entry.chunks, strict=False))


@dataclass(slots=True)
class Bases:
    """The newest base of one rank that is known here. After a restart the store is asked for it, once; failing is no harm."""

    store: Store
    _base: Base | None = None
    _seen: tuple[Index, Order] | None = None
    """Of a commit that was seen since, not a base yet."""
    _asked: bool = False

    async def newest(self, info: AttemptInfo) -> Base | None:
        """The base for the save `info`."""
        if self._seen is not None:
            (index, order), self._seen = self._seen, None
            self.committed(await aside(len(index.tensors), Base.of, index, order))
        if self._base is None and not self._asked:
            self._asked = True
            try:
                found = await _stored_base(self.store, info)
            except CheckpointdError as error:
                log.info("%s: rank %d writes everything: no earlier checkpoint to refer to (%s)", info.prefix, info.rank, error)
                return None
            self.committed(found)
        return self._base

    def forget(self) -> None:
        """What is stored may be damaged: the next save writes everything."""
        self._base, self._seen, self._asked = None, None, True

    def saw(self, index: Index, order: Order) -> None:
        """An attempt that stored `index` was seen committed, durably (DEDUP-2)."""
        if self._seen is None or order > self._seen[1]:
            self._seen = index, order

    def committed(self, base: Base | None) -> None:
        """`base` is of an attempt that was seen committed, durably (DEDUP-2); older ones than what is known are ignored."""
        if base is not None and (self._base is None or base.order > self._base.order):
            self._base = base


async def _stored_base(store: Store, info: AttemptInfo) -> Base | None:
    tag = await catalog.latest(store)
    if tag is None:
        return None
    checkpoint = await catalog.find(store, tag)
    if checkpoint.attempt.epoch > info.attempt.epoch:
        return None  # this writer is a zombie: what a newer epoch does is not its to build on
    if await store.stat(f"{checkpoint.prefix}/{DAMAGED}") is not None:
        return None
    await store.settle(f"{checkpoint.prefix}/{OUTCOME}")
    return Base.of(await read_index(store, checkpoint, info.rank), checkpoint.outcome.order, is_read=False)


# --- references -------------------------------------------------------------------------------------------------


def referred(index: Index) -> tuple[str, ...]:
    """The keys of older attempts' objects that `index` names, sorted."""
    return tuple(sorted({ref.key("") for ref in index.objects if ref.held_by}))


async def lost(store: Store, index: Index) -> str | None:
    """Why `index`, which is durable, must not be voted for: an object of an older attempt that is condemned or
    gone (DEDUP-3).
    """
    for prefix in sorted({ref.held_by for ref in index.objects if ref.held_by}):
        try:
            fault = await _fault(store, prefix, [ref for ref in index.objects if ref.held_by == prefix])
        except (DamagedError, NotFoundError) as error:
            fault = f"the mark of {prefix} cannot be read: {error}"
        if fault:
            return fault
    return None


async def damaged(store: Store, prefix: str, index: Index, config: LoadConfig, on_bytes: Callable[[int], None]) -> str | None:
    """Why `index`, of the attempt `prefix`, must not be voted for: a chunk of an older attempt that is not what
    it was (DEDUP-4).
    """
    wanted = [
        ChunkRead(index.objects[chunk.object].key(prefix), index.rank, entry, chunk, start)
        for entry in index.tensors
        for start, chunk in chunk_starts(entry)
        if index.objects[chunk.object].held_by
    ]
    found = await read_chunks(store, wanted, config, on_bytes)
    return str(found[0]) if found else None


async def _fault(store: Store, prefix: str, refs: Iterable[ObjectRef]) -> str | None:
    sizes = {entry.name: entry.size for entry in await store.list(prefix)}
    if OUTCOME not in sizes:
        return f"{prefix} has no outcome any more"
    kept: frozenset[str] | None = None
    if any(mark_number(name) is not None for name in sizes):
        mark = await standing_mark(store, prefix, sizes)
        kept = frozenset(mark.kept if mark is not None else ())
    for ref in refs:
        if sizes.get(ref.name) != ref.size:
            return f"{ref.key('')} is gone"
        if kept is not None and ref.name not in kept:
            return f"{ref.key('')} is being removed"
    return None


# --- no progress -----------------------------------------------------------------------------------------------


def trained(index: Index, base: Base | None) -> Trained:
    """Whether any tensor of `index` that requires grad differs from an earlier step's; empty where that cannot be told."""
    if base is None or index.step <= base.step:
        return ""
    try:
        names = _trained(tree.decode(index.tree))
    except FormatError:
        return ""  # whose tree that is, hears of it at the next load; the save is not at fault
    parts = [entry for entry in index.tensors if entry.fqn in names and entry.chunks]
    if not parts:
        return ""
    return "still" if all(_same(entry, base) for entry in parts) else "moved"


def _same(entry: TensorEntry, base: Base) -> bool:
    known = base.chunks.get(_part(entry))
    mine = _by_start(entry)
    return known is not None and known.keys() == mine.keys() and all(known[at].digest == mine[at].digest for at in mine)


def _trained(root: tree.Node) -> set[str]:
    """The FQNs of tensors that require grad."""
    found: set[str] = set()
    level: list[tree.Node] = [root]
    while level:
        found |= {node.fqn for node in level if isinstance(node, tree.Tensor) and node.requires_grad}
        level = [child for node in level for child in tree.children(node)]
    return found
