"""The memory tier: the newest complete snapshot of every rank, for a trainer that starts again on this node.

Invariants
  T1  At most one snapshot per (root, rank) is held: the newest by (epoch, n) that was whole, or none.
  T2  The snapshots held stay below `held_bytes_max`; what does not fit is not held, nor is what it would have replaced.
  T3  A snapshot is held from before its slot could be free for a newer one: there is no moment without any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from checkpointd.codec.checksum import xxh3_128
from checkpointd.daemon.layouts import wire_tensors
from checkpointd.daemon.memory import SlotMemory
from checkpointd.daemon.wire import Held, Snapshot
from checkpointd.pipeline.shard import AttemptInfo, Bytes, Shard, ShardTensor


@dataclass(eq=False, slots=True)
class Kept:
    """One snapshot; `digests` are the tensors' xxh3-128 in the layout's order, taken when it was complete."""

    root: str
    info: AttemptInfo
    slot: SlotMemory
    shard: Shard
    digests: asyncio.Future[tuple[bytes, ...]]
    nonce: str
    uid: int
    """The user whose memory it is: nobody else is given it."""
    phase: str = "staged"
    timer: asyncio.TimerHandle | None = None

    @property
    def order(self) -> tuple[int, int]:
        return (self.info.attempt.epoch, self.info.n)

    def described(self) -> Held:
        info = self.info
        return Held(
            tag=info.tag,
            attempt=str(info.attempt),
            step=info.step,
            order=self.order,
            world_size=info.world_size,
            nbytes=self.slot.nbytes,
            phase=self.phase,
            nonce=self.nonce,
            rank=info.rank,
        )

    def as_message(self) -> Snapshot:
        """What goes back to the trainer beside the descriptor; its digests must have been taken."""
        return Snapshot(
            held=self.described(),
            nbytes=len(self.shard.image),
            tensors=wire_tensors(self.shard.tensors),
            aliases=self.shard.aliases,
            excluded=self.shard.excluded,
            tree=self.shard.tree,
            digests=self.digests.result(),
        )


@dataclass(slots=True)
class Tier:
    """Holds snapshots; see the invariants above."""

    held_bytes_max: int
    _kept: dict[tuple[str, int], Kept] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(kept.slot.nbytes for kept in self._kept.values())

    def offer(self, root: str, info: AttemptInfo, slot: SlotMemory, shard: Shard, *, nonce: str, uid: int) -> Kept | None:
        """Hold this complete snapshot instead of the older one of its rank; None where it is older, or there is no room."""
        key = (root, info.rank)
        before = self._kept.get(key)
        if before is not None and before.order >= (info.attempt.epoch, info.n):
            return None
        if self.nbytes - (before.slot.nbytes if before else 0) + slot.nbytes > self.held_bytes_max:
            if before is not None:
                self.drop(before)  # it would keep a slot from its client, and nobody wants what is not the newest
            return None
        kept = Kept(root, info, slot, shard, _digests(shard), nonce, uid)
        slot.use(kept)
        self._kept[key] = kept
        if before is not None:
            self._let_go(before)
        return kept

    def of(self, root: str, rank: int) -> Kept | None:
        """What is held for a rank."""
        return self._kept.get((root, rank))

    def at(self, root: str) -> Iterator[Kept]:
        """What is held for the ranks of a root."""
        return (kept for kept in list(self._kept.values()) if kept.root == root)

    def drop(self, kept: Kept) -> None:
        """Hold it no longer, if it is still the one that is held."""
        key = (kept.root, kept.info.rank)
        if self._kept.get(key) is kept:
            del self._kept[key]
            self._let_go(kept)

    def drop_after(self, kept: Kept, seconds: float) -> None:
        """Hold it so much longer: its trainer has gone, and may come back."""
        if kept.timer is not None:
            kept.timer.cancel()
        kept.timer = asyncio.get_running_loop().call_later(seconds, self.drop, kept)

    def wanted(self, kept: Kept) -> None:
        """Its trainer is back: hold it until there is a newer one."""
        if kept.timer is not None:
            kept.timer.cancel()
            kept.timer = None

    def _let_go(self, kept: Kept) -> None:
        self.wanted(kept)
        kept.digests.cancel()
        kept.slot.leave(kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(list(self._kept.values()))


def _digests(shard: Shard) -> asyncio.Future[tuple[bytes, ...]]:
    return asyncio.get_running_loop().run_in_executor(None, digests_of, shard.image, shard.tensors)


def digests_of(image: Bytes, tensors: tuple[ShardTensor, ...]) -> tuple[bytes, ...]:
    """The xxh3-128 of each tensor's bytes in `image`. Releases the GIL; about 0.05 s a GiB."""
    return tuple(xxh3_128(image[t.offset : t.offset + t.nbytes]) for t in tensors)
