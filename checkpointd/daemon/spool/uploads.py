"""The upload of one shard from the spool to the root.

Invariants
  SENDING-1  Every chunk is verified between the read from the spool and the write to the root, so damage in the spool never
      becomes an object of a checkpoint. The index is compared with the digest that the vote names.
  SENDING-2  An object counts as uploaded only once its writer has finished it, and after a crash only if the spool has a
      durable note of that and it still has the right size. Any other object of this writer at the root is torn, and is removed
      and sent again.
  SENDING-3  The order at the root is that of any save: chunks, then the index, then the look at the references
      (DEDUP-3 in `dedup.py`), then the vote.
  SENDING-4  Memory stays below `budget_bytes`, or that of one chunk if it is larger.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.config import PersistConfig
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.errors import DamagedError, LostReferenceError, NotFoundError, StoreError
from checkpointd.layout.indexes import RAW, Chunk, Index, decode_index
from checkpointd.layout.keys import object_key
from checkpointd.layout.manifest import LISTING_BYTES_MAX, ObjectRef, digest
from checkpointd.pipeline.meter import Meter
from checkpointd.pipeline.pages import page_buffer
from checkpointd.pipeline.shard import Bytes, ShardProgress
from checkpointd.pipeline.workers import aside, run_workers
from checkpointd.pipeline.write.dedup import lost
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.limited import LimitedWriter, TokenBucket

log = logging.getLogger("checkpointd")
T = TypeVar("T")


class SpoolUnreadError(StoreError):
    """The spool's disk does not give a part of the shard, at least not now."""


@dataclass(frozen=True, slots=True)
class ChunkRun:
    """Neighbouring chunks `[start, stop)` of an object, which are read and written together."""

    start: int
    stop: int
    chunks: tuple[Chunk, ...]


def runs_of(chunks: Sequence[Chunk], size: int, block_bytes: int) -> Iterator[ChunkRun]:
    """An object of `size` bytes as runs of about `block_bytes`, which hold whole chunks and what lies between them."""
    start, held = 0, list[Chunk]()
    ordered = sorted(chunks, key=lambda chunk: chunk.offset)
    for at, chunk in enumerate(ordered):
        held.append(chunk)
        following = ordered[at + 1].offset if at + 1 < len(ordered) else size
        if following - start >= block_bytes or following == size:
            yield ChunkRun(start, following, tuple(held))
            start, held = following, []
    if not ordered:
        yield from (ChunkRun(first, min(size, first + block_bytes), ()) for first in range(0, size, block_bytes))


@dataclass(slots=True, kw_only=True)
class Upload:
    """The upload of `shard` to `root`. `check_stop` raises Stopped if the attempt was decided meanwhile."""

    shard: SpooledShard
    root: Store
    config: PersistConfig
    bucket: TokenBucket | None
    progress: ShardProgress
    check_stop: Callable[[], None]
    sent: Meter = field(default_factory=Meter)

    async def run(self) -> Index:
        """Send what is not there yet, and check the references. Returns the index, which is durable at the root.

        Raises DamagedError if the spool is damaged, LostReferenceError, StoreError if the root or the spool fails, and Stopped.
        """
        vote, store = self.shard.record.vote, self.shard.spool.store
        assert vote.index is not None
        key = object_key(vote.prefix, vote.index.name)
        data = await self._from_spool(store.get(key, size_max=LISTING_BYTES_MAX))
        if len(data) != vote.index.size or digest(data) != vote.index.digest:
            raise self._damaged(f"{key} has other bytes than were written")
        index = await aside(vote.tensors, decode_index, data, vote.index.plan, key)
        self.progress.uploaded = 0
        chunks = await aside(vote.tensors, _own_chunks, index)
        for ref in vote.objects:
            await self._send(ref, chunks.get(ref.name, ()))
        self.check_stop()
        await self._put_index(key, data)
        self.progress.uploaded = self.progress.upload_total
        if (why := await lost(self.root, index, spooled=True)) is not None:
            raise LostReferenceError(f"the save refers to an older chunk that is gone from the root by now: {why}")
        return index

    async def _put_index(self, key: str, data: bytes) -> None:
        if not await self.root.put_if_absent(key, data) and await self.root.get(key, size_max=LISTING_BYTES_MAX) != data:
            raise StoreError(f"{key} exists already, with other bytes: is the job running twice as one rank?")

    async def _send(self, ref: ObjectRef, chunks: Sequence[Chunk]) -> None:
        key = ref.key(self.shard.prefix)
        note = _done(key)
        there = await self.root.stat(key)
        if note in self.shard.notes and there == ref.size:
            self.progress.uploaded += ref.size
            return
        await self.shard.forget_note(note)
        if there is not None:
            await self.root.delete(key)  # SENDING-2
        target: ObjectWriter = await self.root.open_writer(key, size_hint=ref.size)
        if self.bucket is not None:
            target = LimitedWriter(target, self.bucket)
        try:
            runs = runs_of(chunks, ref.size, self.config.block_bytes)
            works = [partial(self._copy, key, run, target) for run in runs]
            largest = max((chunk.stored for chunk in chunks), default=0) + self.config.block_bytes
            width = max(1, min(self.config.writes, self.config.budget_bytes // largest))
            await run_workers(works, width, self.check_stop)
            with self.sent.busy():
                await target.finish(ref.size)
        except BaseException:
            await target.discard()
            raise
        await self.shard.try_to_note(note)

    async def _copy(self, key: str, run: ChunkRun, target: ObjectWriter) -> None:
        self.check_stop()
        nbytes = run.stop - run.start
        block = page_buffer(nbytes)
        await self._from_spool(self.shard.spool.store.get_range(key, run.start, block.data))
        wrong = await asyncio.get_running_loop().run_in_executor(None, _first_wrong, run, block)
        if wrong is not None:
            raise self._damaged(f"{key} is damaged at byte {wrong.offset}: its bytes are not those that were written")
        with self.sent.busy(nbytes):
            await target.write_at(run.start, block.data)
        self.progress.uploaded += nbytes

    async def _from_spool(self, read: Awaitable[T]) -> T:
        try:
            return await read
        except (NotFoundError, DamagedError) as error:
            if isinstance(error, NotFoundError) and not await self._has_record():
                raise SpoolUnreadError(f"the spool is empty; is its disk mounted? {error}") from error
            raise self._damaged(str(error)) from error
        except StoreError as error:
            raise SpoolUnreadError(f"the spool's disk fails: {error}") from error

    async def _has_record(self) -> bool:
        """Whether the spool has the shard's record. Without it, another file system may lie at its path for now."""
        return await self._from_spool(self.shard.spool.store.stat(self.shard.record.key)) is not None

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"the spool lost this shard: {why}", rank=self.shard.record.vote.rank)


def _own_chunks(index: Index) -> dict[str, list[Chunk]]:
    """The chunks in objects of the index's own attempt, by the object's name."""
    found: dict[str, list[Chunk]] = {}
    for entry in index.tensors:
        for chunk in entry.chunks:
            ref = index.objects[chunk.object]
            if not ref.held_by:
                found.setdefault(ref.name, []).append(chunk)
    return found


def _first_wrong(run: ChunkRun, block: Bytes) -> Chunk | None:
    for chunk in run.chunks:
        at = chunk.offset - run.start
        stored = block[at : at + chunk.stored]
        good = xxh3_128(stored) == chunk.digest if chunk.codec == RAW else xxh3_64(stored) == chunk.checksum
        if not good:
            return chunk
    return None


def _done(key: str) -> str:
    """The note that the object `key` is uploaded."""
    return f"done-{key.rpartition('/')[2]}"
