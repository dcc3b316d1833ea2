"""Deduplication: finds chunks that did not change since this rank's newest known checkpoint, and refers to them.

Invariants
  DEDUP-1  A reference always names the attempt that holds the bytes. If the base itself only refers to a chunk, the new
      reference names the same attempt as the base's.
  DEDUP-2  A chunk is referred to only if its place (FQN, dtype, shape, box, scope, first byte), its raw length and its digest
      are those of a chunk of the base. The base is a shard of an attempt whose commit was seen and is durable.
  DEDUP-3  A rank votes for an index with references only if, after the index was durable, each object that it refers to was
      there, and stays for the announced attempt: its base holds it (LOG-10). A spooled save is announced later, so it may
      also refer to any attempt that is a checkpoint by then. A commit that refers to what is no checkpoint
      and does not stay is refused.
  DEDUP-4  A shard that was read back and found damaged stops being the base. So does a shard that was not read because another
      rank had found its own damaged, and the shard of a save that took such a base before the damage was found. Chunks that an
      earlier process wrote are read and verified before the first vote for references to them. Damaged storage is a common
      reason for a restart, and every later checkpoint would refer to the same damaged chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from checkpointd.commit.branches import base_in
from checkpointd.commit.facts import Order
from checkpointd.commit.log import fate, pinned_by
from checkpointd.config import LoadConfig
from checkpointd.errors import CheckpointdError, FormatError, StoreError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Chunk, Index, PlanTensor, TensorEntry
from checkpointd.layout.manifest import ObjectRef, Trained
from checkpointd.pipeline.read.chunks import read_chunks
from checkpointd.pipeline.read.index import chunk_starts, read_index
from checkpointd.pipeline.read.plan import StoredObjects
from checkpointd.pipeline.root.log import RootLog
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
    going: frozenset[int] = frozenset()
    """The places in `objects` of those that may be removed."""

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
        if chunk is None or chunk.raw != nbytes or chunk.object in self.going or chunk.full.object in self.going:
            return None
        return self.objects[chunk.object], chunk

    def within(self, holders: Collection[str]) -> Base:
        """The same without the chunks in objects of attempts that are none of `holders` (`<tag>/<attempt>`)."""
        going = frozenset(place for place, ref in enumerate(self.objects) if ref.held_by not in holders)
        return replace(self, going=going) if going else self

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
    state = await RootLog.of(store).look(settles=True, whole=False)
    newest = state.attempts.get(base_in(state))
    if newest is None or newest.id.start > info.attempt.start:
        return None  # a fenced writer must not refer to checkpoints of a newer start
    return Base.of(await read_index(store, newest, info.rank), newest.order, is_read=False)


# --- references -------------------------------------------------------------------------------------------------


def referred(index: Index) -> tuple[str, ...]:
    """The keys of older attempts' objects that `index` names, sorted."""
    return tuple(sorted({ref.key("") for ref in index.objects if ref.held_by}))


async def lost(store: Store, index: Index, *, spooled: bool = False) -> str | None:
    """Why a rank must not vote for the durable `index`: an older attempt's object may go, or is gone (DEDUP-3). `spooled`: the
    snapshot is gone, so the save cannot be written anew.
    """
    if not any(ref.held_by for ref in index.objects):
        return None
    root_log = RootLog.of(store)
    await root_log.follow(lambda _: False)
    state = root_log.state
    own = state.attempts.get(index.prefix)
    staying = pinned_by(state, "" if own is None else own.base)
    for ref in index.objects:
        known = state.attempts.get(ref.held_by)
        may_stay = spooled and known is not None and known.status == "checkpoint"
        if ref.held_by and ref.held_by not in staying and not may_stay:
            return f"{ref.held_by} {fate(state, ref.held_by)}, and is not kept for this save"
        if ref.held_by and await store.stat(ref.key("")) != ref.size:
            return f"{ref.key('')} is gone"
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
