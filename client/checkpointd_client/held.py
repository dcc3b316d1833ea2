"""Snapshots that the sidecar holds in memory: which one all ranks have, and loading from it by copying.

Invariants
  Y1  A held snapshot is loaded only by all ranks together: the same attempt, held whole by each of them.
  Y2  Every byte that is copied belongs to a tensor whose digest, taken when the snapshot was complete, was checked here.
  Y3  A snapshot of another root that had this one's place is never taken: its epoch's nonce must be the one in the store.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from checkpointd.codec.checksum import xxh3_128
from checkpointd.config import Ranks
from checkpointd.daemon.layouts import shard_tensors
from checkpointd.daemon.wire import Held, Layout, Snapshot
from checkpointd.errors import CheckpointdError, DamagedError, UsageError
from checkpointd.layout.boxes import whole
from checkpointd.pipeline import epochs
from checkpointd.pipeline.load import Sink
from checkpointd.pipeline.shard import Bytes, ShardTensor
from checkpointd.store.base import Store

_THREADS = 4


def common(holdings: Mapping[int, tuple[Held, ...]], ranks: Ranks) -> Held | None:
    """The newest snapshot that every rank holds, as rank 0 describes it; None where there is none (Y1)."""
    if holdings.keys() != set(range(ranks.world_size)):
        return None
    everywhere = set.intersection(*({_identity(held) for held in holding} for holding in holdings.values()))
    fitting = [held for held in holdings[0] if _identity(held) in everywhere and held.world_size == ranks.world_size]
    return max(fitting, key=lambda held: held.order, default=None)


def _identity(held: Held) -> tuple[str, str, int, int, str]:
    return (held.tag, held.attempt, held.step, held.world_size, held.nonce)


async def belongs(store: Store, held: Held) -> bool:
    """Whether `held` was saved at this very root (Y3)."""
    try:
        return (await epochs.read(store, held.order[0])).nonce == held.nonce
    except CheckpointdError:
        return False


class HeldSnapshot:
    """A snapshot that was fetched: its tensors' bytes, mapped read-only. DamagedError where it is not what it must be."""

    def __init__(self, snapshot: Snapshot, descriptor: int, rank: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            if size < snapshot.nbytes:
                raise DamagedError(f"the held snapshot has {size} bytes, and its layout {snapshot.nbytes}", rank=rank)
            mapped = mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError) as error:  # ValueError: of no bytes at all
            raise DamagedError(f"the held snapshot cannot be mapped: {error}", rank=rank) from error
        finally:
            os.close(descriptor)
        self.snapshot, self._rank = snapshot, rank
        self._image: Bytes = np.frombuffer(mapped, dtype=np.uint8)
        try:
            self._tensors = shard_tensors(Layout(layout=0, nbytes=snapshot.nbytes, tensors=snapshot.tensors))
        except UsageError as error:
            raise DamagedError(f"the held snapshot cannot be read: {error}", rank=rank) from error
        if len(snapshot.digests) != len(self._tensors):
            raise DamagedError(
                f"the held snapshot has {len(snapshot.digests)} digests, {len(self._tensors)} tensors", rank=rank
            )

    @property
    def entries(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of each tensor by FQN. DamagedError where one is held in part."""
        for tensor in self._tensors:
            if tensor.scope != "rank" or tensor.box != whole(tensor.shape):
                raise DamagedError(f"{tensor.fqn} is held in part", fqn=tensor.fqn, rank=self._rank)
        return {tensor.fqn: (tensor.dtype, tensor.shape) for tensor in self._tensors}

    def check(self, wanted: Iterable[str]) -> None:
        """Raise DamagedError unless the bytes of the tensors named are what they were (Y2)."""
        names = set(wanted)
        pairs = [(t, d) for t, d in zip(self._tensors, self.snapshot.digests, strict=True) if t.fqn in names]
        with ThreadPoolExecutor(_THREADS) as threads:
            whole_ones = list(threads.map(lambda pair: xxh3_128(self._bytes(pair[0])) == pair[1], pairs))
        for (tensor, _), good in zip(pairs, whole_ones, strict=True):
            if not good:
                message = f"{tensor.fqn} of the held snapshot {self.snapshot.held.tag} changed in memory (rank {self._rank})"
                raise DamagedError(message, fqn=tensor.fqn, rank=self._rank)

    def read(self, sinks: Mapping[str, Sink]) -> None:
        """Copy the tensors named in `sinks`."""
        wanted = [tensor for tensor in self._tensors if tensor.fqn in sinks]
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda tensor: sinks[tensor.fqn](0, self._bytes(tensor)), wanted))

    def _bytes(self, tensor: ShardTensor) -> Bytes:
        return self._image[tensor.offset : tensor.offset + tensor.nbytes]
