"""The sidecar's memory as the source of a load: finds the snapshot that all ranks have, and copies from it.

Invariants
  RETAINED-1  A retained snapshot is loaded only by all ranks together: the same attempt, held whole for each of them.
  RETAINED-2  Every byte that is copied belongs to a box whose digest, taken when the snapshot was complete, is checked here. A
      box that lies in one run in its target is checked there, and so it is read once.
  RETAINED-3  A snapshot of an earlier root at the same path is never loaded: its start's nonce must be the one in the store.
      Its attempt must be committed, or its sidecar must still work at it: no aborted or removed attempt is loaded.
  RETAINED-4  Tensors that ranks hold together are assembled from the snapshots of one attempt in this node's sidecar, if these
      have every wanted element. Otherwise the store is read.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np

from checkpointd.codec.checksum import xxh3_128, xxh3_128_hasher
from checkpointd.commit.machine import FINAL
from checkpointd.config import PINNED_BYTES, Ranks
from checkpointd.daemon.memory.layouts import shard_tensors
from checkpointd.daemon.protocol.wire import Layout, RetainedSnapshot, Snapshot
from checkpointd.errors import DamagedError, SidecarError, UsageError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, intersect, tiling_fault, whole
from checkpointd.layout.log_records import LogState
from checkpointd.layout.regions import relative, slices
from checkpointd.pipeline.read.plan import CARRIERS, BoxRequest, BoxSink, SharedRun
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.shard import Bytes, ShardTensor
from checkpointd_client.restore.bind import Target
from checkpointd_client.restore.content import RankContent, check_contexts
from checkpointd_client.restore.store_source import Prints, same_bits, same_prints, scratch, stands_below, wants
from checkpointd_client.restore.uploads import Uploads
from checkpointd_client.sidecar.client import SidecarClient

log = logging.getLogger("checkpointd")
T = TypeVar("T")
Call = Callable[[Coroutine[Any, Any, T]], T]
"""Runs a coroutine on the writer's thread and waits for it."""

_THREADS = 4
_PIECE_BYTES = 1 << 20
"""Bytes that are read and then checked: few enough that the check finds them in the processor's cache, and many enough that
threads seldom wait for the interpreter."""


def common(holdings: Mapping[int, tuple[RetainedSnapshot, ...]], ranks: Ranks) -> RetainedSnapshot | None:
    """The newest snapshot that is retained for every rank, as rank 0 describes it; None if there is none (RETAINED-1)."""
    if holdings.keys() != set(range(ranks.world_size)):
        return None
    everywhere = set.intersection(*({_identity(held) for held in holding} for holding in holdings.values()))
    fitting = [held for held in holdings[0] if _identity(held) in everywhere and held.world_size == ranks.world_size]
    return max(fitting, key=lambda held: held.order, default=None)


def _identity(held: RetainedSnapshot) -> tuple[str, str, int, int, str]:
    return (held.tag, held.attempt, held.step, held.world_size, held.nonce)


def counts(state: LogState, held: RetainedSnapshot) -> bool:
    """Whether `held` was saved at the root with this state of the log, and is a checkpoint there or may still become one
    (RETAINED-3).
    """
    one = state.attempts.get(f"{held.tag}/{held.attempt}")
    if one is None or not starts.is_taken(state, one.id.start, held.nonce):
        return False
    if one.status == "undecided":
        return held.phase not in FINAL
    if one.status != "checkpoint":
        log.info("%s was %s at the root, so its snapshot in memory is not loaded", one.prefix, one.status)
    return one.status == "checkpoint" and not one.left_behind


class FetchedSnapshot:
    """A snapshot that was fetched: its tensors' bytes, mapped read-only. DamagedError if it contradicts its layout."""

    def __init__(self, snapshot: Snapshot, descriptor: int, rank: int) -> None:
        self.snapshot, self._rank, self._descriptor = snapshot, rank, descriptor
        close = weakref.finalize(self, os.close, descriptor)
        try:
            self._buffer = self._mapped()
            self.tensors = shard_tensors(Layout(layout=0, nbytes=snapshot.nbytes, tensors=snapshot.tensors))
            if len(snapshot.digests) != len(self.tensors):
                words = f"the retained snapshot has {len(snapshot.digests)} digests, {len(self.tensors)} tensors"
                raise DamagedError(words, rank=rank)
        except UsageError as error:
            close()
            raise DamagedError(f"the retained snapshot cannot be read: {error}", rank=rank) from error
        except DamagedError:
            close()
            raise
        self._digests = dict(zip(map(id, self.tensors), snapshot.digests, strict=True))

    def _mapped(self) -> Bytes:
        nbytes = self.snapshot.nbytes
        try:
            size = os.fstat(self._descriptor).st_size
            if size < nbytes:
                raise DamagedError(f"the retained snapshot has {size} bytes, and its layout {nbytes}", rank=self._rank)
            mapped = mmap.mmap(self._descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:  # ValueError: of no bytes at all
            raise DamagedError(f"the retained snapshot cannot be mapped: {error}", rank=self._rank) from error
        return np.frombuffer(mapped, dtype=np.uint8)

    @property
    def rank_and_tree(self) -> tuple[int, bytes]:
        """The rank whose snapshot it is, and its state tree."""
        return self._rank, self.snapshot.tree

    def digest_of(self, tensor: ShardTensor) -> bytes:
        """The digest of this box of this snapshot, taken when the snapshot was complete."""
        return self._digests[id(tensor)]

    def check(self, wanted: Iterable[ShardTensor]) -> None:
        """Raise DamagedError if the bytes of these boxes of this snapshot have changed (RETAINED-2)."""
        boxes = list(wanted)
        with ThreadPoolExecutor(_THREADS) as threads:
            good = list(threads.map(lambda tensor: xxh3_128(self._bytes(tensor)) == self.digest_of(tensor), boxes))
        for tensor, same in zip(boxes, good, strict=True):
            if not same:
                raise self._changed(tensor)

    def read(self, tensor: ShardTensor, memory: Bytes) -> None:
        """Read the box into `memory`, and check it there (RETAINED-2). Raises DamagedError if its bytes have changed."""
        digest, at = xxh3_128_hasher(), 0
        while at < memory.nbytes:
            # Read and not copied from the mapping, which would have to be made page by page.
            count = os.preadv(self._descriptor, [memory[at : at + _PIECE_BYTES].data], tensor.offset + at)
            if not count:
                break  # it is shorter now
            digest.update(memory[at : at + count].data)
            at += count
        if digest.digest() != self.digest_of(tensor):
            raise self._changed(tensor)

    def _changed(self, tensor: ShardTensor) -> DamagedError:
        message = f"{tensor.fqn} of the retained snapshot {self.snapshot.held.tag} changed in memory (rank {self._rank})"
        return DamagedError(message, fqn=tensor.fqn, rank=self._rank)

    def give(self, tensor: ShardTensor, box: Box, sink: BoxSink) -> None:
        """Pass `box`, which lies inside the box of `tensor`, to `sink`."""
        elements = self._bytes(tensor).view(CARRIERS[tensor.itemsize]).reshape(tensor.box.sizes)
        sink(box, elements[slices(tensor.box, box)])

    def _bytes(self, tensor: ShardTensor) -> Bytes:
        return self._buffer[tensor.offset : tensor.offset + tensor.nbytes]


_Piece = tuple[FetchedSnapshot, ShardTensor]


def _by_snapshot(pieces: Iterable[_Piece]) -> list[tuple[FetchedSnapshot, list[ShardTensor]]]:
    """The boxes of each snapshot, each box once."""
    found: dict[int, tuple[FetchedSnapshot, dict[int, ShardTensor]]] = {}
    for snapshot, tensor in pieces:
        found.setdefault(id(snapshot), (snapshot, {}))[1][id(tensor)] = tensor
    return [(snapshot, list(tensors.values())) for snapshot, tensors in found.values()]


@dataclass(slots=True)
class MemorySource:
    """One attempt in this node's sidecar: this rank's snapshot, and those of other ranks if they share tensors."""

    own: FetchedSnapshot
    others: Mapping[int, FetchedSnapshot]
    rank: int
    pinned_bytes: int = PINNED_BYTES
    """The most host memory that the load pins."""
    kind: Literal["store", "memory", "spool"] = "memory"
    _known: dict[tuple[str, int | None, Box], list[_Piece]] = field(default_factory=dict)
    """What holds a wanted box, by its tensor, its rank and itself: a load asks before it fills."""

    @staticmethod
    def fetched(
        sidecar: SidecarClient, held: RetainedSnapshot, rank: int, call: Call[Any], *, pinned_bytes: int
    ) -> MemorySource:
        """Fetch this rank's snapshot, and those of other ranks that are there now. DamagedError if this rank's is not."""
        try:
            snapshot, descriptor = call(sidecar.fetch(held))
            own = FetchedSnapshot(snapshot, descriptor, rank)
        except (SidecarError, UsageError) as error:
            raise DamagedError(f"the retained snapshot cannot be fetched: {error}", rank=rank) from error
        if all(tensor.scope == "rank" for tensor in own.tensors):
            return MemorySource(own, {}, rank, pinned_bytes)
        others: dict[int, FetchedSnapshot] = {}
        for beside in call(sidecar.beside(held)):
            found, descriptor = call(sidecar.fetch(beside))
            number = -1 if beside.rank is None else beside.rank
            others[number] = FetchedSnapshot(found, descriptor, number)
        return MemorySource(own, others, rank, pinned_bytes)

    @property
    def tag(self) -> str:
        return self.own.snapshot.held.tag

    @property
    def step(self) -> int:
        return self.own.snapshot.held.step

    def content(self) -> RankContent:
        """The content that this rank saved. DamagedError if snapshots contradict each other."""
        snapshot = self.own.snapshot
        entries: dict[str, tuple[str, tuple[int, ...]]] = {}
        for _, tensor in self._shared():
            described = (tensor.dtype, tensor.shape)
            if entries.setdefault(tensor.fqn, described) != described:
                raise DamagedError(
                    f"{tensor.fqn} is not the same tensor in all retained snapshots", fqn=tensor.fqn, rank=self.rank
                )
        own = {tensor.fqn: (tensor.dtype, tensor.shape) for tensor in self.own.tensors if tensor.scope == "rank"}
        return RankContent(
            root=tree.decode(snapshot.tree),
            entries=entries | own,
            owners=dict.fromkeys(own, self.rank),
            aliases=snapshot.aliases,
            excluded=snapshot.excluded,
        )

    def more(self) -> RankContent | None:
        """Raises SidecarError: only the store has the content of other ranks."""
        raise SidecarError(f"rank {self.rank} asks for values that it did not save")

    def has_elsewhere(self, places: Sequence[str], content: RankContent) -> bool:
        """False. SidecarError if another rank has values there, or if one on another node may have some."""
        apart = bool(self.others) and len(self.others) + 1 < self.own.snapshot.held.world_size
        if places and (apart or stands_below(places, content)):
            raise SidecarError(f"another rank has the values at {places[0]}")
        return False

    def equal(self, one: str, two: str, content: RankContent) -> bool:
        """SidecarError if not all of both is on this node: other nodes could then come to another answer."""
        parts = self._parts()
        wanted = [content.request(fqn, whole(content.entries[fqn][1])) for fqn in (one, two)]
        known = same_prints(*(self._prints(self._covering(want, parts)) for want in wanted))
        if known is not None:
            return known
        both = scratch((one, two), content)
        self.fill(both, content)
        return same_bits(both[0].tensor, both[1].tensor)

    @staticmethod
    def _prints(pieces: Iterable[_Piece]) -> Prints:
        return {tensor.box: ((tensor.nbytes, snapshot.digest_of(tensor)),) for snapshot, tensor in pieces}

    def locate(self, targets: Sequence[Target], content: RankContent) -> None:
        """SidecarError if not all of it is on this node."""
        parts, found = self._parts(), wants(targets, content, None)
        for want in found:
            self._covering(want, parts)
        check_contexts(content, found, lambda want: (held.rank_and_tree for held, _ in self._covering(want, parts)))

    def verify(self, targets: Sequence[Target], content: RankContent) -> None:
        """SidecarError if not all of it is on this node, DamagedError if it changed."""
        parts = self._parts()
        found = (piece for want in wants(targets, content, None) for piece in self._covering(want, parts))
        for snapshot, tensors in _by_snapshot(found):
            snapshot.check(tensors)

    def fill(self, targets: Sequence[Target], content: RankContent) -> None:
        """Copy the boxes, and verify them: in the targets, or where they are if only parts of them are copied."""
        parts = self._parts()
        with Uploads(self.pinned_bytes) as uploads:
            whole, cut = self._by_run(wants(targets, content, uploads), parts)
            for snapshot, tensors in _by_snapshot((snapshot, tensor) for snapshot, tensor, _, _ in cut):
                snapshot.check(tensors)
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(lambda item: item[0].read(item[1], item[2]), whole))
                list(threads.map(lambda item: item[0].give(*item[1:]), cut))

    def _by_run(
        self, found: Iterable[BoxRequest], parts: Mapping[tuple[str, bool], list[_Piece]]
    ) -> tuple[list[tuple[FetchedSnapshot, ShardTensor, Bytes]], list[tuple[FetchedSnapshot, ShardTensor, Box, BoxSink]]]:
        """The boxes that lie in one run in their targets, each with its place there, and the parts of all others."""
        whole: list[tuple[FetchedSnapshot, ShardTensor, Bytes]] = []
        cut: list[tuple[FetchedSnapshot, ShardTensor, Box, BoxSink]] = []
        for want in found:
            assert want.sink is not None
            for snapshot, tensor in self._covering(want, parts):
                run = SharedRun.of(tensor.box, want, tensor.itemsize)
                place = None if run is None else run.place(0, tensor.nbytes)
                box = intersect(tensor.box, want.box)
                assert box is not None
                if place is not None:
                    whole.append((snapshot, tensor, place.data))
                else:
                    cut.append((snapshot, tensor, box, want.sink))
        return whole, cut

    def _shared(self) -> Iterable[_Piece]:
        snapshots = (self.own, *self.others.values())
        return ((snapshot, tensor) for snapshot in snapshots for tensor in snapshot.tensors if tensor.scope == "global")

    def _parts(self) -> dict[tuple[str, bool], list[_Piece]]:
        """The boxes of each tensor, by its FQN and whether ranks hold it together."""
        found: dict[tuple[str, bool], list[_Piece]] = {}
        for snapshot, tensor in self._shared():
            found.setdefault((tensor.fqn, True), []).append((snapshot, tensor))
        for tensor in self.own.tensors:
            if tensor.scope == "rank":
                found.setdefault((tensor.fqn, False), []).append((self.own, tensor))
        return found

    def _covering(self, want: BoxRequest, parts: Mapping[tuple[str, bool], list[_Piece]]) -> list[_Piece]:
        """The boxes that together hold the wanted box (RETAINED-4)."""
        key = (want.fqn, want.rank, want.box)
        if key not in self._known:
            self._known[key] = self._found_for(want, parts)
        return self._known[key]

    def _found_for(self, want: BoxRequest, parts: Mapping[tuple[str, bool], list[_Piece]]) -> list[_Piece]:
        found = (p for p in parts.get((want.fqn, want.rank is None), ()) if intersect(p[1].box, want.box) is not None)
        once: dict[Box, _Piece] = {}  # a replica is read from one rank only
        for snapshot, tensor in found:
            other, same = once.setdefault(tensor.box, (snapshot, tensor))
            if other.digest_of(same) != snapshot.digest_of(tensor):  # its save may be in doubt, and would be aborted for this
                raise SidecarError(f"ranks hold different values of {want.fqn} in this node's memory")
        pieces = list(once.values())
        shared = [box for _, tensor in pieces if (box := intersect(tensor.box, want.box)) is not None]
        fault = tiling_fault(want.box.sizes, relative(shared, want.box))
        if fault is None:
            return pieces
        if want.rank is not None:
            raise DamagedError(f"{want.fqn} is held in part: {fault}", fqn=want.fqn, rank=self.rank)
        raise SidecarError(f"this node's memory does not hold all of {want.fqn} that rank {self.rank} needs: {fault}")
