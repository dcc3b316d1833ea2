"""The chunks of a shard: choose codecs, write raw tensors as they lie in the snapshot, encode the others into a second object.

What is unchanged since the base (`unchanged.py`) is hashed, and neither encoded nor written.

Invariants
  B1  When `write_chunks` returns, every object of this attempt that the index names is durable.
  B2  When it returns or raises, no thread reads the image any more.
  B3  Memory beside the image stays below `budget_bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from checkpointd.codec import Codec, ElementType, Estimate, choose
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.config import PersistConfig
from checkpointd.errors import StoreFullError
from checkpointd.layout.keys import chunks_name
from checkpointd.layout.manifest import Chunk, Index, ObjectRef, TensorEntry
from checkpointd.pipeline.packer import Encoded, Packer
from checkpointd.pipeline.pages import Run, locate, runs_of
from checkpointd.pipeline.rates import Meter, Rates
from checkpointd.pipeline.shard import AttemptInfo, Progress, Shard, ShardTensor
from checkpointd.pipeline.spans import ChunkKey, Placed, Span, grouped, spans_of
from checkpointd.pipeline.unchanged import Base
from checkpointd.pipeline.workers import Stopped, run_workers
from checkpointd.store.base import ObjectWriter, Store

RAW_PART, ENCODED_PART = 0, 1
LOT_BYTES = 256 << 20
"""Raw chunks are compared with the base in lots of this size: the next one is compared while one is written."""

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """One call of `persist`: everything that its steps share."""

    store: Store
    info: AttemptInfo
    shard: Shard
    config: PersistConfig
    rates: Rates
    progress: Progress
    stopped: Callable[[], bool]
    base: Base | None = None
    """The checkpoint before, to which unchanged chunks may refer where `config.dedup` says so; None: there is none."""
    on_stored: Callable[[Index], None] = lambda _: None
    """Called with the index once it is durable, before the vote; may raise what then keeps this rank from voting yes."""

    @property
    def refers(self) -> bool:
        """Whether what is unchanged is referred to."""
        return self.config.dedup and self.base is not None

    def check_stop(self) -> None:
        if self.stopped():
            raise Stopped


async def write_chunks(job: Persist) -> Index:
    """Write all chunks that changed durably and return the index that names all of them (not yet written)."""
    codecs = await _choose_codecs(job)
    raw = [t for t in job.shard.tensors if codecs[t.fqn] == "raw"]
    packed = [t for t in job.shard.tensors if codecs[t.fqn] != "raw"]
    job.progress.raw_total = job.shard.nbytes
    placed = Placed()
    opened: list[ObjectWriter] = []
    try:
        if any(t.nbytes for t in raw):
            await _write_raw(job, raw, opened, placed)
        if any(t.nbytes for t in packed):
            await _write_packed(job, packed, codecs, opened, placed)
    except BaseException:
        for part in opened:
            await part.discard()
        raise
    return _index(job, placed)


async def _choose_codecs(job: Persist) -> dict[str, Codec]:
    """The codec of each tensor by FQN. Samples only where it can make a difference."""
    tensors, nothing, perfect = job.shard.tensors, Estimate(zstd=1.0, planes=1.0), Estimate(zstd=0.0, planes=0.0)
    forced = job.config.compression != "auto"
    if forced or _chosen(job, perfect) == "raw":
        return dict.fromkeys((t.fqn for t in tensors), _chosen(job, nothing))
    estimates = await asyncio.get_running_loop().run_in_executor(None, job.rates.estimates, job.shard)
    return {t.fqn: _chosen(job, estimates[t.fqn]) for t in tensors}


def _chosen(job: Persist, estimate: Estimate) -> Codec:
    config, rates = job.config, job.rates
    return choose(config.compression, estimate, disk_bps=rates.disk_bps, encode_bps=rates.encode_bps, threads=config.encoders)


# --- what has not changed ---------------------------------------------------------------------------------------


def _comparisons(job: Persist, spans: list[Span], placed: Placed) -> list[Work]:
    """Works that find out which of `spans` are unchanged; none where there is no base."""
    if not job.refers:
        return []
    loop = asyncio.get_running_loop()

    async def compare(group: list[Span]) -> None:
        found = await loop.run_in_executor(None, _compared, job, group)
        placed.held.update(found.held)
        placed.digests.update(found.digests)
        for span in group:
            if span.key in found.held:
                job.progress.add(span.nbytes, 0)

    return [partial(compare, group) for group in grouped(spans, job.config.block_bytes)]


def _compared(job: Persist, group: list[Span]) -> Placed:
    found = Placed()
    assert job.base is not None
    for span in group:
        held = job.base.held(span.tensor, span.start, span.nbytes)
        if held is None:
            continue
        digest = xxh3_128(span.of(job.shard.image))
        if digest == held[1].digest:
            found.held[span.key] = held
        else:
            found.digests[span.key] = digest
    return found


# --- raw --------------------------------------------------------------------------------------------------------


async def _write_raw(job: Persist, tensors: list[ShardTensor], opened: list[ObjectWriter], placed: Placed) -> None:
    """Store the pages that hold what changed of `tensors` as they lie in the image, and hash every chunk."""
    spans = spans_of(tensors, job.config.chunk_bytes)
    lots = [spans] if not job.refers else grouped(spans, LOT_BYTES)
    part = _RawPart(job, opened, placed)
    await run_workers(_comparisons(job, lots[0], placed), job.config.writes, job.check_stop)
    for number, lot in enumerate(lots):
        following = _comparisons(job, lots[number + 1], placed) if number + 1 < len(lots) else []
        works = await part.works(placed.changed(lot), alone=len(lots) == 1)
        mixed = [work for pair in zip_longest(works, following) for work in pair if work is not None]
        await run_workers(mixed, job.config.writes, job.check_stop)
    await part.finish()


class _RawPart:
    """The object of raw chunks, opened when there is something to write."""

    def __init__(self, job: Persist, opened: list[ObjectWriter], placed: Placed) -> None:
        self._job, self._opened, self._placed = job, opened, placed
        self._name = chunks_name(job.info.rank, RAW_PART, job.info.hand)
        self._target: ObjectWriter | None = None
        self._size = 0
        self._meter = Meter()

    async def works(self, spans: list[Span], *, alone: bool) -> list[Work]:
        """Works that write `spans` behind what was written before, and hash them. `alone`: nothing else will follow."""
        if not spans:
            return []
        runs = runs_of(spans, self._size)
        self._size = runs[-1].base + runs[-1].stop - runs[-1].start
        target = self._target = self._target or await self._open(self._size if alone else self._job.rates.raw_object_bytes)
        block_bytes = self._job.config.block_bytes
        writes = [partial(self._write, target, block) for run in runs for block in _blocks(run, block_bytes)]
        hashes = [partial(self._hash, group, runs) for group in grouped(spans, block_bytes)]
        # Hashing a block right beside writing it keeps disk and core busy together.
        return [work for pair in zip_longest(writes, hashes) for work in pair if work is not None]

    async def _open(self, size: int) -> ObjectWriter:
        job = self._job
        key = job.info.key(self._name)
        try:
            target = await job.store.open_writer(key, size_hint=size)
        except StoreFullError:
            if not job.refers:
                raise
            target = await job.store.open_writer(key, size_hint=0)  # less may be written this time than was last time
        self._opened.append(target)
        return target

    async def _write(self, target: ObjectWriter, block: Run) -> None:
        async with self._meter.writing(block.stop - block.start):
            await target.write_at(block.base, self._job.shard.image[block.start : block.stop].data)

    async def _hash(self, group: list[Span], runs: list[Run]) -> None:
        job, placed = self._job, self._placed
        found = await asyncio.get_running_loop().run_in_executor(None, _hash_group, job, group, runs, placed)
        placed.chunks.update(found)
        nbytes = sum(span.nbytes for span in group)
        job.progress.add(nbytes, nbytes)

    async def finish(self) -> None:
        """Make the object durable, where there is one."""
        self._job.rates.raw_object_bytes = self._size
        if self._target is None:
            return
        async with self._meter.writing(0):
            await self._target.finish(self._size)
        self._job.rates.measured_disk(self._meter.nbytes, self._meter.seconds)
        self._placed.objects.append(ObjectRef(name=self._name, size=self._size))


def _blocks(run: Run, block_bytes: int) -> Iterator[Run]:
    for at in range(run.start, run.stop, block_bytes):
        yield Run(at, min(at + block_bytes, run.stop), run.base + at - run.start)


def _hash_group(job: Persist, group: list[Span], runs: list[Run], placed: Placed) -> dict[ChunkKey, Chunk]:
    found: dict[ChunkKey, Chunk] = {}
    for span in group:
        data, part = span.of(job.shard.image), len(placed.objects)
        digest = placed.digests.get(span.key) or xxh3_128(data)
        found[span.key] = Chunk(part, locate(runs, span.offset), span.nbytes, span.nbytes, "raw", xxh3_64(data), digest)
    return found


# --- encoded ----------------------------------------------------------------------------------------------------


async def _write_packed(
    job: Persist, tensors: list[ShardTensor], codecs: dict[str, Codec], opened: list[ObjectWriter], placed: Placed
) -> None:
    """Encode what changed of `tensors` on threads and store it back to back, in the order in which it is ready."""
    spans = spans_of(tensors, job.config.chunk_bytes)
    await run_workers(_comparisons(job, spans, placed), job.config.encoders, job.check_stop)
    spans = placed.changed(spans)
    if not spans:
        return
    name, part = chunks_name(job.info.rank, ENCODED_PART, job.info.hand), len(placed.objects)
    target = await job.store.open_writer(job.info.key(name), size_hint=0)
    opened.append(target)
    meter = Meter()
    packer = Packer(target, job.config, meter)
    loop = asyncio.get_running_loop()
    spent: list[float] = []

    async def pack(span: Span) -> None:
        codec, element = codecs[span.tensor.fqn], ElementType.of_dtype(span.tensor.dtype)
        known = placed.digests.get(span.key)
        done = await loop.run_in_executor(None, Encoded.of, span.of(job.shard.image), codec, element, known)
        spent.append(done.seconds)
        offset = await packer.add(done.stored)
        placed.chunks[span.key] = Chunk(part, offset, len(done.stored), span.nbytes, done.codec, done.checksum, done.digest)
        job.progress.add(span.nbytes, len(done.stored))

    try:
        await run_workers([partial(pack, span) for span in spans], _encoders(job.config), job.check_stop)
        size = await packer.flush()
    finally:
        await packer.drain()
    async with meter.writing(0):
        await target.finish(size)
    job.rates.measured_disk(meter.nbytes, meter.seconds)
    job.rates.measured_encode(sum(span.nbytes for span in spans), sum(spent))
    placed.objects.append(ObjectRef(name=name, size=size))


def _encoders(config: PersistConfig) -> int:
    """As many encoders as the budget allows beside the packer's buffers; each holds about three chunks."""
    left = config.budget_bytes - 2 * config.block_bytes
    return max(1, min(config.encoders, left // (4 * config.chunk_bytes)))


def _index(job: Persist, placed: Placed) -> Index:
    chunks = placed.by_key()
    entries = tuple(
        TensorEntry(
            t.fqn,
            t.dtype,
            t.shape,
            t.box,
            t.scope,
            tuple(chunks[span.key] for span in spans_of([t], job.config.chunk_bytes)),
        )
        for t in job.shard.tensors
    )
    return Index(
        tag=job.info.tag,
        attempt=str(job.info.attempt),
        rank=job.info.rank,
        world_size=job.info.world_size,
        step=job.info.step,
        objects=placed.all_objects(),
        tensors=entries,
        aliases=job.shard.aliases,
        excluded=job.shard.excluded,
        tree=job.shard.tree,
    )
