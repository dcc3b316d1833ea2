"""The chunks of a shard: choose codecs, write raw tensors as they lie in the snapshot, encode the others into a second object.

What is unchanged since the base (`unchanged.py`) is hashed, and neither encoded nor written. Where that is only a small part of
the old object that holds it, as constants among weights are, it is written once more, apart from what changes (`_split`): a
reference keeps a whole object alive.

Invariants
  B1  When `write_chunks` returns, every object of this attempt that the index names is durable.
  B2  When it returns or raises, no thread reads the image any more.
  B3  Memory beside the image stays below `budget_bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from checkpointd.pipeline.shard import AttemptInfo, Progress, Shard, Share
from checkpointd.pipeline.spans import ChunkKey, Placed, Span, grouped, spans_of
from checkpointd.pipeline.unchanged import Base
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
    job.progress.begin(job.shard.nbytes)
    spans = spans_of(job.shard.tensors, job.config.chunk_bytes)
    placed = await _unchanged(job, spans)
    job.progress.keep(sum(span.nbytes for span in spans if span.key in placed.held))
    job = in_pieces(job)
    raw, packed = _split(placed, spans, codecs)
    opened: list[ObjectWriter] = []
    try:
        if raw:
            await _write_raw(job, raw, opened, placed)
        if packed:
            await _write_packed(job, packed, codecs, opened, placed)
    except BaseException:
        for part in opened:
            await part.discard()
        raise
    return _index(job, placed)


def in_pieces(job: Persist) -> Persist:
    """`job`, with writes no larger than its store lets through at once: how far it has come is known as finely."""
    piece_bytes = job.store.capabilities.piece_bytes
    if piece_bytes is None or piece_bytes >= job.config.block_bytes:
        return job
    return replace(job, config=replace(job.config, block_bytes=piece_bytes))


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


async def _unchanged(job: Persist, spans: list[Span]) -> Placed:
    """Which of `spans` are unchanged, and worth a reference; nothing where there is no base."""
    placed = Placed()
    if not job.refers:
        return placed
    loop = asyncio.get_running_loop()

    async def compare(group: list[Span]) -> None:
        found = await loop.run_in_executor(None, _compared, job, group)
        placed.held.update(found.held)
        placed.digests.update(found.digests)

    groups = grouped(spans, job.config.block_bytes)
    await run_workers([partial(compare, group) for group in groups], job.config.writes, job.check_stop)
    placed.keep_worthy(job.shard.nbytes)
    return placed


def _split(placed: Placed, spans: list[Span], codecs: dict[str, Codec]) -> tuple[list[Span], list[Span]]:
    """What is written raw, as it lies in the image, and what is packed.

    What has not changed, and is written all the same, goes where the other spans of its codec do not: the object in which it
    then lies is one that the next saves can refer to.
    """
    changed = placed.changed(spans)
    raw = [span for span in changed if (codecs[span.tensor.fqn] == "raw") != (span.key in placed.settled)]
    chosen = {span.key for span in raw}
    return raw, [span for span in changed if span.key not in chosen]


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


async def _write_raw(job: Persist, spans: list[Span], opened: list[ObjectWriter], placed: Placed) -> None:
    """Store the pages that hold `spans` as they lie in the image, and hash every chunk."""
    loop, image = asyncio.get_running_loop(), job.shard.image
    runs = runs_of(spans)
    size = runs[-1].base + runs[-1].stop - runs[-1].start
    name = chunks_name(job.info.rank, RAW_PART, job.info.hand)
    meter = Meter()
    target = await job.store.open_writer(job.info.key(name), size_hint=size)
    opened.append(target)
    share = Share(job.progress, sum(span.nbytes for span in spans), size)

    async def write(block: Run) -> None:
        async with meter.writing(block.stop - block.start):
            await target.write_at(block.base, image[block.start : block.stop].data)
        share.written(block.stop - block.start)

    async def hashed(group: list[Span]) -> None:
        placed.chunks.update(await loop.run_in_executor(None, _hash_group, job, group, runs, placed))

    writes = [partial(write, block) for run in runs for block in _blocks(run, job.config.block_bytes)]
    hashes = [partial(hashed, group) for group in grouped(spans, job.config.block_bytes)]
    # Hashing a block right beside writing it keeps disk and core busy together.
    works = [work for pair in zip_longest(writes, hashes) for work in pair if work is not None]
    await run_workers(works, job.config.writes, job.check_stop)
    async with meter.writing(0):
        await target.finish(size)
    job.rates.measured_disk(meter.nbytes, meter.seconds)
    placed.objects.append(ObjectRef(name=name, size=size))


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
    job: Persist, spans: list[Span], codecs: dict[str, Codec], opened: list[ObjectWriter], placed: Placed
) -> None:
    """Encode `spans` on threads and store them back to back, in the order in which they are ready."""
    name, part = chunks_name(job.info.rank, ENCODED_PART, job.info.hand), len(placed.objects)
    target = await job.store.open_writer(job.info.key(name), size_hint=0)
    opened.append(target)
    meter = Meter()
    packer = Packer(target, job.config, meter, job.progress.add)
    loop = asyncio.get_running_loop()
    spent: list[float] = []

    async def pack(span: Span) -> None:
        codec, element = codecs[span.tensor.fqn], ElementType.of_dtype(span.tensor.dtype)
        known = placed.digests.get(span.key)
        done = await loop.run_in_executor(None, Encoded.of, span.of(job.shard.image), codec, element, known)
        spent.append(done.seconds)
        offset = await packer.add(done.stored, span.nbytes)
        placed.chunks[span.key] = Chunk(part, offset, len(done.stored), span.nbytes, done.codec, done.checksum, done.digest)

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
