"""Deduplication: finds chunks that did not change since this rank's newest known checkpoint, and refers to them.

Invariants
  DEDUP-1  A reference always names the attempt that holds the bytes. If the base itself only refers to a chunk, the new
      reference names the same attempt as the base's.
  DEDUP-2  A chunk is referred to only if its place (FQN, dtype, shape, box, scope, first byte), its raw length and its digest
      are those of a chunk of the base. The base is a shard of an attempt whose commit was seen and is durable.
  DEDUP-3  A rank votes for an index with references only if, after the index was durable, each object that it refers to existed
      and was not condemned by a mark of its attempt. A collector makes its marks durable before it looks for indexes, and
      removes only objects that no index names (COLLECT-6 in `collect.py`). So either the rank sees the mark or the collector
      sees the index, whatever runs at the same time: another collection, a save of the same tag, retention, recovery by a newer
      start, another writer. The checkpoint from which the references were taken may be gone by then.
  DEDUP-4  A shard that was read back and found damaged stops being the base. So does a shard that was not read because another
      rank had found its own damaged, and the shard of a save that took such a base before the damage was found. Chunks that an
      earlier process wrote are read and verified before the first vote for references to them. Damaged storage is a common
      reason for a restart, and every later checkpoint would refer to the same damaged chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from checkpointd.commit.facts import Order
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, DamagedError, FormatError, NotFoundError, StoreError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Chunk, Index, PlanTensor, TensorEntry
from checkpointd.layout.keys import DAMAGED, OUTCOME
from checkpointd.layout.manifest import ObjectRef, Trained
from checkpointd.pipeline.read.chunks import read_chunks
from checkpointd.pipeline.read.index import chunk_starts, read_index
from checkpointd.pipeline.read.plan import StoredObjects
from checkpointd.pipeline.root import catalog
from checkpointd.pipeline.root.marks import greatest_mark
from checkpointd.pipeline.shard import AttemptInfo, ShardTensor
from checkpointd.pipeline.workers import answered, aside
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

Held = tuple[ObjectRef, Chunk]
"""A chunk, and the object that holds it, with the object's attempt."""


@dataclass(frozen=True, slots=True)
class Base:
    """One rank's shard of a checkpoint, to which unchanged chunks of a later save may refer."""

    prefix: str
    order: Order
    step: int
    objects: tuple[ObjectRef, ...]
    chunks: Mapping[PlanTensor, Mapping[int, Chunk]]
    """The chunks of each part by their first byte."""
    since_full: int = 0
    """How many checkpoints in a row, up to this one, have deltas."""
    is_read: bool = True
    """Whether this process has written or verified the chunks (DEDUP-4)."""

    @staticmethod
    def of(index: Index, order: Order, *, is_read: bool = True) -> Base:
        """The base from the `index` of a committed attempt."""
        objects = tuple(
            ref if ref.held_by else ObjectRef(name=ref.name, size=ref.size, held_by=index.prefix) for ref in index.objects
        )
        chunks = {entry.part: dict(chunk_starts(entry)) for entry in index.tensors}
        return Base(index.prefix, order, index.step, objects, chunks, index.since_full, is_read)

    def held(self, tensor: ShardTensor, start: int, nbytes: int) -> Held | None:
        """The chunk at the place of the `nbytes` bytes of `tensor` from `start` on; None if there is none of this length."""
        chunk = self.chunks.get(tensor.part, {}).get(start)
        if chunk is None or chunk.raw != nbytes:
            return None
        return self.objects[chunk.object], chunk

    def full(self, chunk: Chunk) -> Held:
        """What `chunk`, one of this base, is stored in full as: its own base if it is a delta, else itself."""
        return self.objects[chunk.full.object], chunk.full


@dataclass(slots=True)
class Bases:
    """The newest known base of one rank. After a restart it is looked up in the store once; without it all chunks are
    written."""

    store: Store
    forgotten: int = 0
    """How often the base was forgotten."""
    _base: Base | None = None
    _seen: tuple[Index, Order] | None = None
    """The index of a newer commit, from which `newest` makes the base."""
    _asked: bool = False

    async def newest(self, info: AttemptInfo) -> Base | None:
        """The base for the save `info`."""
        while (seen := self._seen) is not None:
            index, order = seen
            base = await aside(len(index.tensors), Base.of, index, order)
            if self._seen is seen:  # else it was forgotten meanwhile, or a newer commit was seen
                self._seen = None
                self.committed(base)
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
        """Forget the base, since its chunks may be damaged. The next save writes all chunks."""
        self.forgotten += 1
        self._base, self._seen, self._asked = None, None, True

    def saw(self, index: Index, order: Order, forgotten: int) -> None:
        """Note that an attempt with this `index` has committed, durably (DEDUP-2). `forgotten`: as it was when the attempt took
        its base. If the base was forgotten since then, the index may refer to its damaged chunks (DEDUP-4).
        """
        if forgotten == self.forgotten and (self._seen is None or order > self._seen[1]):
            self._seen = index, order

    def committed(self, base: Base | None) -> None:
        """Use `base`, of an attempt that has committed durably (DEDUP-2), unless a newer base is known."""
        if base is not None and (self._base is None or base.order > self._base.order):
            self._base = base


async def base_in_time(bases: Bases, info: AttemptInfo, seconds: float | None) -> Base | None:
    """The base for the save `info`; None if the root does not tell it within `seconds`, unless that is None."""
    if seconds is None:
        return await bases.newest(info)
    try:
        return await answered(bases.newest(info), seconds)
    except StoreError as error:
        log.info("%s: rank %d writes everything: %s", info.prefix, info.rank, error)
        return None


async def _stored_base(store: Store, info: AttemptInfo) -> Base | None:
    tag = await catalog.latest(store)
    if tag is None:
        return None
    checkpoint = await catalog.find(store, tag)
    if checkpoint.attempt.start > info.attempt.start:
        return None  # this writer is fenced and must not refer to checkpoints of a newer start
    if await store.stat(f"{checkpoint.prefix}/{DAMAGED}") is not None:
        return None
    await store.settle(f"{checkpoint.prefix}/{OUTCOME}")
    return Base.of(await read_index(store, checkpoint, info.rank), checkpoint.outcome.order, is_read=False)


# --- references -------------------------------------------------------------------------------------------------


def referred(index: Index) -> tuple[str, ...]:
    """The keys of older attempts' objects that `index` names, sorted."""
    return tuple(sorted({ref.key("") for ref in index.objects if ref.held_by}))


async def lost(store: Store, index: Index) -> str | None:
    """Why a rank must not vote for the durable `index`: an older attempt's object is condemned or gone (DEDUP-3)."""
    for prefix in sorted({ref.held_by for ref in index.objects if ref.held_by}):
        try:
            fault = await _fault(store, prefix, [ref for ref in index.objects if ref.held_by == prefix])
        except (DamagedError, NotFoundError) as error:
            fault = f"the mark of {prefix} cannot be read: {error}"
        if fault:
            return fault
    return None


async def damaged(store: Store, prefix: str, index: Index, config: LoadConfig, on_bytes: Callable[[int], None]) -> str | None:
    """Why a rank must not vote for `index`, of the attempt `prefix`: a chunk of an older attempt is damaged (DEDUP-4)."""
    stored = StoredObjects.of(index, prefix)
    wanted = [
        stored.read(entry, chunk, start)
        for entry in index.tensors
        for start, chunk in chunk_starts(entry)
        if index.objects[chunk.object].held_by
    ]
    found = await read_chunks(store, wanted, config, on_bytes)
    return str(found[0]) if found else None


async def _fault(store: Store, prefix: str, refs: Iterable[ObjectRef]) -> str | None:
    """Why `refs`, objects of the attempt `prefix`, may not be referred to. Looks at them alone, whatever the number of ranks.

    The marks come first: if they are gone, they went last (MARK-5), so the objects are seen to be gone, too.
    """
    mark = await greatest_mark(store, prefix)
    if await store.stat(f"{prefix}/{OUTCOME}") is None:
        return f"{prefix} has no outcome any more"
    for ref in refs:
        if await store.stat(ref.key("")) != ref.size:
            return f"{ref.key('')} is gone"
        if mark is not None and ref.name not in mark.kept:
            return f"{ref.key('')} is being removed"
    return None


# --- no progress -----------------------------------------------------------------------------------------------


def trained(index: Index, base: Base | None) -> Trained:
    """Whether any tensor of `index` that requires grad differs from `base`, of an earlier step; empty if unknown."""
    if base is None or index.step <= base.step:
        return ""
    try:
        names = _trained(tree.decode(index.tree))
    except FormatError:
        return ""  # the next load reports the tree; the save does not fail
    parts = [entry for entry in index.tensors if entry.fqn in names and entry.chunks]
    if not parts:
        return ""
    return "still" if all(_same(entry, base) for entry in parts) else "moved"


def _same(entry: TensorEntry, base: Base) -> bool:
    known = base.chunks.get(entry.part)
    mine = dict(chunk_starts(entry))
    return known is not None and known.keys() == mine.keys() and all(known[at].digest == mine[at].digest for at in mine)


def _trained(root: tree.Node) -> set[str]:
    """The FQNs of tensors that require grad."""
    found: set[str] = set()
    level: list[tree.Node] = [root]
    while level:
        found |= {node.fqn for node in level if isinstance(node, tree.Tensor) and node.requires_grad}
        found |= {fqn for node in level if isinstance(node, tree.Composite) and node.requires_grad for fqn in tree.fqns(node)}
        level = [child for node in level for child in tree.children(node)]
    return found
