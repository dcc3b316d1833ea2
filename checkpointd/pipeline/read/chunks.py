"""Stage 4 of a load: read neighbouring chunks together; each is verified before its bytes reach a sink.

Invariants
  READ-1  No byte of a chunk reaches a sink before its stored checksum, its codec and its raw digest were checked.
  READ-2  Reads never exceed the sizes in the index, which was verified by its digest.
  READ-3  Memory stays below `budget_bytes`, or below the need of the largest chunk, for shards of any size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from checkpointd.config import LoadConfig
from checkpointd.errors import CodecError, DamagedError, NotFoundError
from checkpointd.pipeline.read.decode import decoded
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store

GAP_BYTES_MAX = 64 << 10
"""Chunks at most this far apart are read together."""


@dataclass(slots=True)
class ReadGroup:
    """Chunks of one object that are read together."""

    key: str
    start: int
    stop: int
    wanted: list[ChunkRead] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """The memory that reading the group takes: its stored bytes, and two copies of a chunk while it is decoded."""
        decoded_max = max(w.chunk.raw if w.chunk.codec != "raw" else 0 for w in self.wanted)
        return self.stop - self.start + 2 * decoded_max


async def read_chunks(
    store: Store, wanted: Iterable[ChunkRead], config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> list[DamagedError]:
    """Read and verify `wanted`, and pass whole chunks to their sinks. `on_bytes` is called with the bytes of each read.

    Returns all damage, in the order of the objects. Whole chunks reach their sinks even if others are damaged, so a caller that
    must fill all or nothing verifies first. Raises UnreadableError if the storage fails. A missing object counts as damage, so
    use a store that raises NotFoundError only if that is proved (`store/patient.py`).
    """
    loop, budget = asyncio.get_running_loop(), Budget(config.budget_bytes)
    groups = group_chunks(wanted, config.block_bytes)
    damage: list[list[DamagedError]] = [[] for _ in groups]

    async def read(group: ReadGroup, found: list[DamagedError]) -> None:
        async with budget.hold(group.nbytes):
            found += await read_now(group)

    async def read_now(group: ReadGroup) -> list[DamagedError]:
        buffer = np.empty(group.stop - group.start, dtype=np.uint8)
        try:
            await store.get_range(group.key, group.start, buffer.data)
        except (NotFoundError, DamagedError) as error:
            return [_lost(group, error)]
        found = await loop.run_in_executor(None, _deliver, group, buffer)
        on_bytes(buffer.nbytes)
        return found

    works = [partial(read, group, found) for group, found in zip(groups, damage, strict=True)]
    await run_workers(works, config.reads)
    return [error for found in damage for error in found]


def group_chunks(wanted: Iterable[ChunkRead], block_bytes: int) -> list[ReadGroup]:
    """Neighbouring chunks in reads of at most `block_bytes`. A larger chunk is read alone."""
    groups: list[ReadGroup] = []
    for item in sorted(wanted, key=lambda w: (w.key, w.chunk.offset)):
        start, stop = item.chunk.offset, item.chunk.offset + item.chunk.stored
        last = groups[-1] if groups else None
        near = last is not None and last.key == item.key and start - last.stop <= GAP_BYTES_MAX
        if last is None or not near or stop - last.start > block_bytes:
            last = ReadGroup(item.key, start, stop)
            groups.append(last)
        last.stop = max(last.stop, stop)
        last.wanted.append(item)
    return groups


def _lost(group: ReadGroup, error: NotFoundError | DamagedError) -> DamagedError:
    first = group.wanted[0]
    fqn, rank = first.entry.fqn, first.rank
    return DamagedError(f"{error} (rank {rank}, {fqn})", key=group.key, fqn=fqn, rank=rank)


def _deliver(group: ReadGroup, buffer: Bytes) -> list[DamagedError]:
    """Verify each chunk of `group`, and pass whole ones to their sinks."""
    damage = []
    for item in group.wanted:
        at = item.chunk.offset - group.start
        try:
            raw = decoded(item.chunk, buffer[at : at + item.chunk.stored])
        except CodecError as error:
            fqn, rank = item.entry.fqn, item.rank
            message = f"{group.key} is damaged at byte {item.chunk.offset}: {error} (rank {rank}, {fqn})"
            damage.append(DamagedError(message, key=group.key, fqn=fqn, rank=rank))
            continue
        for sink in item.sinks:
            sink(item.start, raw)
    return damage


class Budget:
    """A budget of `total` bytes. A request for more waits until all bytes are free, and takes them."""

    def __init__(self, total: int) -> None:
        self._total = self._left = total
        self._change = asyncio.Condition()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until `nbytes` are free, take them, and give them back at the end of the block."""
        share = min(nbytes, self._total)
        async with self._change:
            await self._change.wait_for(lambda: self._left >= share)
            self._left -= share
        try:
            yield
        finally:
            self._left += share
            async with self._change:
                self._change.notify_all()
