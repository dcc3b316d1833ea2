"""Stage 6 of a save: write the raw object and the encoded one, durably.

Chunks of the encoded object are encoded (stage 4) just before they are written, so memory stays within the budget.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

from checkpointd.codec import Codec, ElementType
from checkpointd.config import PersistConfig
from checkpointd.layout.indexes import DELTA, Chunk
from checkpointd.layout.keys import chunks_name
from checkpointd.layout.manifest import ObjectRef
from checkpointd.pipeline.pages import PageRun
from checkpointd.pipeline.shard import Bytes, Share
from checkpointd.pipeline.workers import aside, run_workers
from checkpointd.pipeline.write.dedup import Held
from checkpointd.pipeline.write.encode import Encoded, read_base
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.packer import Packer
from checkpointd.pipeline.write.place import ENCODED_OBJECT, RAW_OBJECT, Placement, RawPlaces
from checkpointd.pipeline.write.split import ChunkKey, Span, grouped
from checkpointd.store.base import ObjectWriter


@dataclass(slots=True)
class WrittenObjects:
    """The durable objects of this attempt, and the chunks in them. `Chunk.object` is the position in `objects`."""

    objects: list[ObjectRef] = field(default_factory=list)
    chunks: dict[ChunkKey, Chunk] = field(default_factory=dict)
    bases: dict[ChunkKey, Held] = field(default_factory=dict)
    """The bases of the chunks that became deltas."""


@asynccontextmanager
async def discarded_on_error() -> AsyncIterator[list[ObjectWriter]]:
    """A list for the writers that the block opens. If the block raises, they are discarded."""
    opened: list[ObjectWriter] = []
    try:
        yield opened
    except BaseException:
        for target in opened:
            await target.discard()
        raise


async def write_objects(
    job: PersistJob,
    placement: Placement,
    codecs: Mapping[str, Codec],
    digests: Mapping[ChunkKey, bytes],
    deltas: Mapping[ChunkKey, Held],
) -> WrittenObjects:
    """Write the spans of `placement`. `digests` has the digests of spans that were hashed before, `deltas` the chunks of which
    spans may become deltas.
    """
    job, written = job.in_small_writes(), WrittenObjects()
    async with discarded_on_error() as opened:
        if placement.raw.spans:
            opened.append(await _open(job, RAW_OBJECT, size_hint=placement.raw.nbytes))
            await _write_raw(job, placement.raw, digests, opened[-1], written)
        if placement.encoded:
            # No chunk is stored in more bytes than it has raw.
            opened.append(await _open(job, ENCODED_OBJECT, size_max=sum(span.nbytes for span in placement.encoded)))
            await _write_encoded(job, placement.encoded, codecs, digests, deltas, opened[-1], written)
    job.rates.measured_disk(job.spent.disk.nbytes, job.spent.disk.seconds)
    return written


async def _open(job: PersistJob, part: int, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
    key = job.info.key(chunks_name(job.info.rank, part))
    return await job.store.open_writer(key, size_hint=size_hint, size_max=size_max)


async def _finish(job: PersistJob, part: int, target: ObjectWriter, size: int, written: WrittenObjects) -> None:
    with job.spent.disk.busy():
        await target.finish(size)
    written.objects.append(ObjectRef(name=chunks_name(job.info.rank, part), size=size))


# --- raw --------------------------------------------------------------------------------------------------------


async def _write_raw(
    job: PersistJob, places: RawPlaces, digests: Mapping[ChunkKey, bytes], target: ObjectWriter, written: WrittenObjects
) -> None:
    """Write the pages that hold the spans, as they are in the buffer, and hash every chunk."""
    loop, buffer, number = asyncio.get_running_loop(), job.shard.buffer, len(written.objects)
    clock = job.progress.clock  # the loop's own clock may count in milliseconds
    share = Share(job.progress, sum(span.nbytes for span in places.spans), places.nbytes)

    async def write(block: PageRun) -> None:
        began = clock()
        with job.spent.disk.busy(block.stop - block.start):
            await target.write_at(block.base, buffer[block.start : block.stop].data)
        share.written(block.stop - block.start)
        await job.progress.rest(clock() - began)

    async def hashed(group: list[Span]) -> None:
        began = clock()
        with job.spent.hash.busy():
            written.chunks.update(await loop.run_in_executor(None, _hash_group, group, buffer, digests, places, number))
        await job.progress.rest(clock() - began)

    writes = [partial(write, block) for run in places.runs for block in _blocks(run, job.config.block_bytes)]
    groups = await aside(len(places.spans), grouped, places.spans, job.config.block_bytes)
    hashes = [partial(hashed, group) for group in groups]
    # Hashing and writing alternate, so disk and cores are busy at the same time.
    works = [work for pair in zip_longest(writes, hashes) for work in pair if work is not None]
    await run_workers(works, max(job.config.writes, job.store.capabilities.at_once), job.check_stop)
    await _finish(job, RAW_OBJECT, target, places.nbytes, written)


def _blocks(run: PageRun, block_bytes: int) -> Iterator[PageRun]:
    for at in range(run.start, run.stop, block_bytes):
        yield PageRun(at, min(at + block_bytes, run.stop), run.base + at - run.start)


def _hash_group(
    group: list[Span], buffer: Bytes, digests: Mapping[ChunkKey, bytes], places: RawPlaces, number: int
) -> dict[ChunkKey, Chunk]:
    hashed = ((span, Encoded.raw_of(span.of(buffer), digests.get(span.key))) for span in group)
    return {span.key: one.at(number, places.offset(span)) for span, one in hashed}


# --- encoded ----------------------------------------------------------------------------------------------------


async def _write_encoded(
    job: PersistJob,
    spans: list[Span],
    codecs: Mapping[str, Codec],
    digests: Mapping[ChunkKey, bytes],
    deltas: Mapping[ChunkKey, Held],
    target: ObjectWriter,
    written: WrittenObjects,
) -> None:
    """Encode `spans` on threads, and write them back to back in the order in which they are ready."""
    loop, buffer, number = asyncio.get_running_loop(), job.shard.buffer, len(written.objects)
    store = job.store.capabilities
    packer = Packer(target, job.config, store.alignment, job.spent.disk, job.progress.add, store.at_once)
    seconds: list[float] = []
    useless: set[str] = set()

    async def pack(span: Span) -> None:
        codec, element = codecs[span.tensor.fqn], ElementType.of_dtype(span.tensor.dtype)
        held = deltas.get(span.key)
        base = await read_base(job, span, held) if held is not None else None
        with job.spent.codec.busy():
            done = await loop.run_in_executor(None, Encoded.of, span.of(buffer), codec, element, digests.get(span.key), base)
        if held is not None and done.codec == DELTA:
            written.bases[span.key] = held
        elif base is not None:
            useless.add(span.tensor.fqn)
        seconds.append(done.seconds)
        written.chunks[span.key] = done.at(number, await packer.add(done.stored, span.nbytes))
        await job.progress.rest(done.seconds)

    try:
        await run_workers([partial(pack, span) for span in spans], _encoders(job.config, bool(deltas)), job.check_stop)
        size = await packer.flush()
    finally:
        await packer.drain()
    await _finish(job, ENCODED_OBJECT, target, size, written)
    for fqn in useless - {fqn for fqn, _, _ in written.bases}:
        job.rates.leave_out(fqn, job.config.full_every or 1)  # until the deltas have another base
    job.rates.measured_encode(sum(span.nbytes for span in spans), sum(seconds))


def _encoders(config: PersistConfig, deltas: bool) -> int:
    """The number of encoders that the budget allows beside the packer's buffers.

    Each holds about three chunks; for a delta also the base, stored and raw, and the difference.
    """
    left = config.budget_bytes - 2 * config.block_bytes
    return max(1, min(config.encoders, left // ((7 if deltas else 4) * config.chunk_bytes)))
