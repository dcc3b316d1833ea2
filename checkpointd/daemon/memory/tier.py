"""The memory tier: the newest complete snapshot of every rank, for a trainer that starts again on this node.

Invariants
  TIER-1  At most one snapshot per (root, user, rank) is held: the newest by (epoch, n) that was whole, or none. Where several
      users write at one root, nobody's snapshot is given to another user, nor makes room for another user's.
  TIER-2  The snapshots held stay below `held_bytes_max`; what does not fit is not held, nor is what it would have replaced.
  TIER-3  A snapshot is held from before its slot could be free for a newer one: there is no moment without any.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from checkpointd.codec.checksum import xxh3_128
from checkpointd.daemon.accounts import Charge
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.memory.mapped import SlotMemory
from checkpointd.daemon.protocol.wire import RetainedSnapshot, Snapshot
from checkpointd.pipeline.shard import AttemptInfo, Bytes, Shard, ShardTensor

TierKey = tuple[str, int, int]
"""Root, user and rank."""


@dataclass(eq=False, slots=True)
class Kept:
    """One snapshot; `digests` are the tensors' xxh3-128 in the layout's order, taken when it was complete."""

    root: str
    info: AttemptInfo
    slot: SlotMemory
    shard: Shard
    charge: Charge
    """What it takes beside its slot."""
    digests: asyncio.Future[tuple[bytes, ...]]
    nonce: str
    uid: int
    """The user whose memory it is."""
    phase: str = "staged"
    timer: asyncio.TimerHandle | None = None

    @property
    def key(self) -> TierKey:
        return (self.root, self.uid, self.info.rank)

    @property
    def order(self) -> tuple[int, int]:
        return (self.info.attempt.epoch, self.info.n)

    def described(self) -> RetainedSnapshot:
        info = self.info
        return RetainedSnapshot(
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
            nbytes=len(self.shard.buffer),
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
    _kept: dict[TierKey, Kept] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(kept.slot.nbytes for kept in self._kept.values())

    def offer(
        self, root: str, info: AttemptInfo, slot: SlotMemory, shard: Shard, charge: Charge, *, nonce: str, uid: int
    ) -> Kept | None:
        """Hold this complete snapshot instead of this rank's older one; None where it is the older one, or there is no room.

        Takes the `charge`, also where it is not held.
        """
        before = self.of(root, uid, info.rank)
        if before is not None and before.order >= (info.attempt.epoch, info.n):
            charge.release()
            return None
        if self.nbytes - (before.slot.nbytes if before else 0) + slot.nbytes > self.held_bytes_max:
            if before is not None:
                self.drop(before)  # it would keep a slot from its client, and nobody wants what is not the newest
            charge.release()
            return None
        kept = Kept(root, info, slot, shard, charge, _digests(shard), nonce, uid)
        slot.use(kept)
        self._kept[kept.key] = kept
        if before is not None:
            self._let_go(before)
        return kept

    def of(self, root: str, uid: int, rank: int) -> Kept | None:
        """What is held for a rank of a user."""
        return self._kept.get((root, uid, rank))

    def at(self, root: str, uid: int) -> Iterator[Kept]:
        """What is held for the ranks of a user at a root."""
        return (kept for kept in list(self._kept.values()) if (kept.root, kept.uid) == (root, uid))

    def drop(self, kept: Kept) -> None:
        """Hold it no longer, if it is still the one that is held."""
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]
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
        kept.charge.release()
        kept.slot.leave(kept)

    def __iter__(self) -> Iterator[Kept]:
        return iter(list(self._kept.values()))


def _digests(shard: Shard) -> asyncio.Future[tuple[bytes, ...]]:
    return asyncio.get_running_loop().run_in_executor(None, digests_of, shard.buffer, shard.tensors)


def digests_of(buffer: Bytes, tensors: tuple[ShardTensor, ...]) -> tuple[bytes, ...]:
    """The xxh3-128 of each tensor's bytes in `buffer`. Releases the GIL; about 0.05 s a GiB."""
    return tuple(xxh3_128(buffer[t.offset : t.offset + t.nbytes]) for t in tensors)
