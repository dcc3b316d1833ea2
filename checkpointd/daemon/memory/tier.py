"""The memory tier: retains the newest whole snapshot of every rank, for a trainer that starts again on this node.

Invariants
  TIER-1  At most one snapshot per (root, user, rank) is retained: the newest whole one by (start, n). If several users write at
      one root, no user gets another user's snapshot or replaces it.
  TIER-2  The retained snapshots together stay below `held_bytes_max`. If a snapshot does not fit, neither it nor the older
      snapshot of its rank is retained.
  TIER-3  A new snapshot is retained before the slot of the older one becomes free, so there is always one.
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
    """A retained snapshot. `digests`: the xxh3-128 of the tensors in the layout's order, computed when it was whole."""

    root: str
    info: AttemptInfo
    slot: SlotMemory
    shard: Shard
    charge: Charge
    """The memory that it takes in addition to its slot."""
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
        return (self.info.attempt.start, self.info.n)

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
        """The message that gives it back to the trainer; its digests must be done."""
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
    """The retained snapshots; see the invariants above."""

    held_bytes_max: int
    _kept: dict[TierKey, Kept] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(kept.slot.nbytes for kept in self._kept.values())

    def offer(
        self, root: str, info: AttemptInfo, slot: SlotMemory, shard: Shard, charge: Charge, *, nonce: str, uid: int
    ) -> Kept | None:
        """Retain this whole snapshot instead of the rank's older one; None if it is not newer, or there is no room.

        Takes over the `charge`, even if the snapshot is not retained.
        """
        before = self.of(root, uid, info.rank)
        if before is not None and before.order >= (info.attempt.start, info.n):
            charge.release()
            return None
        if self.nbytes - (before.slot.nbytes if before else 0) + slot.nbytes > self.held_bytes_max:
            if before is not None:
                self.drop(before)  # nobody needs it any longer, and its client needs the slot
            charge.release()
            return None
        kept = Kept(root, info, slot, shard, charge, _digests(shard), nonce, uid)
        slot.use(kept)
        self._kept[kept.key] = kept
        if before is not None:
            self._let_go(before)
        return kept

    def of(self, root: str, uid: int, rank: int) -> Kept | None:
        """The retained snapshot of a rank of a user."""
        return self._kept.get((root, uid, rank))

    def at(self, root: str, uid: int) -> Iterator[Kept]:
        """The retained snapshots of a user's ranks at a root."""
        return (kept for kept in list(self._kept.values()) if (kept.root, kept.uid) == (root, uid))

    def drop(self, kept: Kept) -> None:
        """Stop retaining it, unless a newer one has replaced it already."""
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]
            self._let_go(kept)

    def drop_after(self, kept: Kept, seconds: float) -> None:
        """Retain it for `seconds` more: its trainer has gone and may come back."""
        if kept.timer is not None:
            kept.timer.cancel()
        kept.timer = asyncio.get_running_loop().call_later(seconds, self.drop, kept)

    def wanted(self, kept: Kept) -> None:
        """Its trainer is back: retain it until there is a newer one."""
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
