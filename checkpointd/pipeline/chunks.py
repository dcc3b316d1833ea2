"""The chunks of a shard: choose codecs, write raw tensors as they lie in the snapshot, encode the others into a second object.

Invariants
  B1  When `write_chunks` returns, every object that the index names is durable.
  B2  When it returns or raises, no thread reads the image any more.
  B3  Memory beside the image stays below `budget_bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from checkpointd.codec import Codec, ElementType, Estimate, choose
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.config import PersistConfig
from checkpointd.layout.keys import chunks_name
from checkpointd.layout.manifest import Chunk, Index, ObjectRef, TensorEntry
from checkpointd.pipeline.packer import Encoded, Packer
from checkpointd.pipeline.pages import Run, locate, runs_of
from checkpointd.pipeline.rates import Meter, Rates
from checkpointd.pipeline.shard import AttemptInfo, Bytes, Progress, Shard, ShardTensor
from checkpointd.pipeline.workers import Stopped, run_workers
from checkpointd.store.base import ObjectWriter, Store

RAW_PART, ENCODED_PART = 0, 1


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

    def check_stop(self) -> None:
        if self.stopped():
            raise Stopped


async def write_chunks(job: Persist) -> Index:
    """Write all chunks durably and return the index that names them (not yet written)."""
    codecs = await _choose_codecs(job)
    raw = [t for t in job.shard.tensors if codecs[t.fqn] == "raw"]
    packed = [t for t in job.shard.tensors if codecs[t.fqn] != "raw"]
    job.progress.raw_total = job.shard.nbytes
    objects: list[ObjectRef] = []
    chunks: dict[ChunkKey, Chunk] = {}
    opened: list[ObjectWriter] = []
    try:
        if any(t.nbytes for t in raw):
            await _write_raw(job, raw, opened, objects, chunks)
        if any(t.nbytes for t in packed):
            await _write_packed(job, packed, codecs, opened, objects, chunks)
    except BaseException:
        for part in opened:
            await part.discard()
        raise
    return _index(job, objects, chunks)


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


ChunkKey = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """What becomes one chunk: `nbytes` bytes of `tensor` from its byte `start` on."""

    tensor: ShardTensor
    start: int
    nbytes: int

    @property
    def key(self) -> ChunkKey:
        return (self.tensor.fqn, self.tensor.offset, self.start)

    def of(self, image: Bytes) -> Bytes:
        at = self.tensor.offset + self.start
        return image[at : at + self.nbytes]


def _spans(tensors: Iterable[ShardTensor], chunk_bytes: int) -> list[Span]:
    """The chunks of `tensors` in order: whole elements, at most `chunk_bytes` each."""
    spans = []
    for tensor in tensors:
        step = max(chunk_bytes // tensor.itemsize, 1) * tensor.itemsize
        spans += [Span(tensor, start, min(step, tensor.nbytes - start)) for start in range(0, tensor.nbytes, step)]
    return spans


async def _write_raw(
    job: Persist,
    tensors: list[ShardTensor],
    opened: list[ObjectWriter],
    objects: list[ObjectRef],
    chunks: dict[ChunkKey, Chunk],
) -> None:
    """Store the pages that hold `tensors` as they lie in the image, and hash every chunk."""
    loop, image = asyncio.get_running_loop(), job.shard.image
    runs = runs_of(tensors)
    size = runs[-1].base + runs[-1].stop - runs[-1].start
    name = chunks_name(job.info.rank, RAW_PART, job.info.hand)
    meter = Meter()
    target = await job.store.open_writer(job.info.key(name), size_hint=size)
    opened.append(target)

    async def write(block: Run) -> None:
        async with meter.writing(block.stop - block.start):
            await target.write_at(block.base, image[block.start : block.stop].data)

    async def hashed(group: list[Span]) -> None:
        chunks.update(await loop.run_in_executor(None, _hash_group, job, group, runs, len(objects)))
        nbytes = sum(span.nbytes for span in group)
        job.progress.add(nbytes, nbytes)

    writes = [partial(write, block) for run in runs for block in _blocks(run, job.config.block_bytes)]
    hashes = [partial(hashed, group) for group in _groups(_spans(tensors, job.config.chunk_bytes), job.config.block_bytes)]
    # Hashing a block right beside writing it keeps disk and core busy together.
    works = [work for pair in zip_longest(writes, hashes) for work in pair if work is not None]
    await run_workers(works, job.config.writes, job.check_stop)
    async with meter.writing(0):
        await target.finish(size)
    job.rates.measured_disk(meter.nbytes, meter.seconds)
    objects.append(ObjectRef(name=name, size=size))


def _blocks(run: Run, block_bytes: int) -> Iterator[Run]:
    for at in range(run.start, run.stop, block_bytes):
        yield Run(at, min(at + block_bytes, run.stop), run.base + at - run.start)


def _groups(spans: list[Span], nbytes: int) -> list[list[Span]]:
    """Spans in lots of about `nbytes`, so that one call to a thread hashes many small ones."""
    groups: list[list[Span]] = []
    filled = nbytes
    for span in spans:
        if filled >= nbytes:
            groups.append([])
            filled = 0
        groups[-1].append(span)
        filled += span.nbytes
    return groups


def _hash_group(job: Persist, group: list[Span], runs: list[Run], part: int) -> dict[ChunkKey, Chunk]:
    found: dict[ChunkKey, Chunk] = {}
    for span in group:
        data = span.of(job.shard.image)
        offset = locate(runs, span.tensor.offset + span.start)
        found[span.key] = Chunk(part, offset, span.nbytes, span.nbytes, "raw", xxh3_64(data), xxh3_128(data))
    return found


async def _write_packed(
    job: Persist,
    tensors: list[ShardTensor],
    codecs: dict[str, Codec],
    opened: list[ObjectWriter],
    objects: list[ObjectRef],
    chunks: dict[ChunkKey, Chunk],
) -> None:
    """Encode the chunks of `tensors` on threads and store them back to back, in the order in which they are ready."""
    name, part = chunks_name(job.info.rank, ENCODED_PART, job.info.hand), len(objects)
    target = await job.store.open_writer(job.info.key(name), size_hint=0)
    opened.append(target)
    meter = Meter()
    packer = Packer(target, job.config, meter)
    loop = asyncio.get_running_loop()
    spent: list[float] = []

    async def pack(span: Span) -> None:
        codec, element = codecs[span.tensor.fqn], ElementType.of_dtype(span.tensor.dtype)
        done = await loop.run_in_executor(None, Encoded.of, span.of(job.shard.image), codec, element)
        spent.append(done.seconds)
        offset = await packer.add(done.stored)
        chunks[span.key] = Chunk(part, offset, len(done.stored), span.nbytes, done.codec, done.checksum, done.digest)
        job.progress.add(span.nbytes, len(done.stored))

    spans = _spans(tensors, job.config.chunk_bytes)
    try:
        await run_workers([partial(pack, span) for span in spans], _encoders(job.config), job.check_stop)
        size = await packer.flush()
    finally:
        await packer.drain()
    async with meter.writing(0):
        await target.finish(size)
    job.rates.measured_disk(meter.nbytes, meter.seconds)
    job.rates.measured_encode(sum(span.nbytes for span in spans), sum(spent))
    objects.append(ObjectRef(name=name, size=size))


def _encoders(config: PersistConfig) -> int:
    """As many encoders as the budget allows beside the packer's buffers; each holds about three chunks."""
    left = config.budget_bytes - 2 * config.block_bytes
    return max(1, min(config.encoders, left // (4 * config.chunk_bytes)))


def _index(job: Persist, objects: list[ObjectRef], chunks: dict[ChunkKey, Chunk]) -> Index:
    entries = tuple(
        TensorEntry(
            t.fqn,
            t.dtype,
            t.shape,
            t.box,
            t.scope,
            tuple(chunks[span.key] for span in _spans([t], job.config.chunk_bytes)),
        )
        for t in job.shard.tensors
    )
    return Index(
        tag=job.info.tag,
        attempt=str(job.info.attempt),
        rank=job.info.rank,
        world_size=job.info.world_size,
        step=job.info.step,
        objects=tuple(objects),
        tensors=entries,
        aliases=job.shard.aliases,
        excluded=job.shard.excluded,
        tree=job.shard.tree,
    )
