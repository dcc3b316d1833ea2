"""Read chunks back: the chain of digests first, then chunks, each verified before anybody sees its bytes.

Invariants
  L1  No byte of a chunk reaches a sink before its stored checksum, its codec and its raw digest have agreed.
  L2  What is read is bounded by the digests: sizes come from objects that were verified, reads never exceed them.
  L3  Memory stays below `budget_bytes`, or what the one largest chunk needs, whatever the shard's size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from checkpointd.codec import decode as decode_chunk
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.config import LoadConfig
from checkpointd.errors import CodecError, DamagedError, FormatError, NotFoundError, WorldSizeError
from checkpointd.layout.boxes import whole
from checkpointd.layout.keys import vote_name
from checkpointd.layout.manifest import Chunk, Index, ObjectRef, TensorEntry
from checkpointd.pipeline.budget import Budget
from checkpointd.pipeline.catalog import Checkpoint, index_named_by, read_vote
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store

Sink = Callable[[int, Bytes], None]
"""Takes the raw bytes of one chunk at a byte offset of its box. Runs on a thread; keeps nothing of what it is given."""

GAP_BYTES_MAX = 64 << 10
"""Chunks at most this far apart are read in one go."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One chunk to read: where it lies, of which tensor and rank, where in its box, and who gets it (none: only verify it)."""

    key: str
    rank: int
    entry: TensorEntry
    chunk: Chunk
    start: int
    sinks: tuple[Sink, ...] = ()


@dataclass(slots=True)
class Group:
    """Chunks of one object that are read together."""

    key: str
    start: int
    stop: int
    wanted: list[Wanted] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """What reading the group takes: its stored bytes, and a chunk at a time as a codec gives it out and as it is wanted."""
        decoded_max = max(w.chunk.raw if w.chunk.codec != "raw" else 0 for w in self.wanted)
        return self.stop - self.start + 2 * decoded_max


async def read_index(store: Store, checkpoint: Checkpoint, rank: int) -> Index:
    """The index of `rank`, verified along outcome, vote and index. WorldSizeError where the rank did not exist."""
    outcome = checkpoint.outcome
    ref = outcome.votes.get(str(rank))
    if ref is None:
        raise WorldSizeError(
            f"{checkpoint.tag} was saved by {outcome.world_size} ranks, so there is nothing for rank {rank}: "
            "start the job with as many ranks as saved it"
        )
    key = f"{checkpoint.prefix}/{vote_name(rank)}"
    try:
        vote = await read_vote(store, key, ref.digest)
        key = f"{checkpoint.prefix}/{vote.index.name}" if vote.index else key
        index = await index_named_by(store, checkpoint.prefix, vote)
        if index.step != outcome.step:
            raise DamagedError(f"{key} is of step {index.step}, the outcome of step {outcome.step}")
        return index
    except (NotFoundError, DamagedError) as error:
        raise DamagedError(f"{error} (rank {rank} of {checkpoint.tag})", key=key, rank=rank) from error


def entries_by_fqn(index: Index) -> dict[str, TensorEntry]:
    """The tensors of `index` by FQN. FormatError where one lies there in part: `world.py` puts parts together."""
    part = next((entry for entry in index.tensors if entry.scope != "rank" or entry.box != whole(entry.shape)), None)
    if part is not None:
        message = f"rank {index.rank} of {index.tag} holds a part of {part.fqn}; this release loads whole tensors only"
        raise FormatError(message, fqn=part.fqn, rank=index.rank)
    return {entry.fqn: entry for entry in index.tensors}


def object_key(prefix: str, ref: ObjectRef) -> str:
    """Where the chunks object `ref` of an index of the attempt at `prefix` lies."""
    return ref.key(prefix)


def chunk_starts(entry: TensorEntry) -> Iterator[tuple[int, Chunk]]:
    """The chunks of `entry`, each with the byte of the box at which it begins."""
    start = 0
    for chunk in entry.chunks:
        yield start, chunk
        start += chunk.raw


async def read_tensors(
    store: Store,
    prefix: str,
    index: Index,
    sinks: Mapping[str, Sink | None],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[DamagedError]:
    """Read and verify the chunks of one rank's tensors named in `sinks` and hand them over; a sink of None only verifies.

    Returns and raises what `read_chunks` does.
    """
    keys = [object_key(prefix, ref) for ref in index.objects]
    wanted = [
        Wanted(keys[chunk.object], index.rank, entry, chunk, start, (sink,) if sink else ())
        for entry in index.tensors
        if entry.fqn in sinks
        for sink in (sinks[entry.fqn],)
        for start, chunk in chunk_starts(entry)
    ]
    return await read_chunks(store, wanted, config, on_bytes)


def wanted_of(prefix: str, index: Index) -> Iterator[Wanted]:
    """Every chunk of `index`, of the attempt at `prefix`, to be verified alone."""
    keys = [object_key(prefix, ref) for ref in index.objects]
    for entry in index.tensors:
        for start, chunk in chunk_starts(entry):
            yield Wanted(keys[chunk.object], index.rank, entry, chunk, start)


async def read_chunks(
    store: Store, wanted: Iterable[Wanted], config: LoadConfig, on_bytes: Callable[[int], None] = lambda _: None
) -> list[DamagedError]:
    """Read and verify `wanted` and hand over what is whole; `on_bytes` hears of every read.

    Returns every damage found, in the order of the objects; chunks that are whole were handed over all the same, so a
    caller that must not touch anything verifies first. Raises UnreadableError where the storage fails. That an object is not
    there counts as damage: give a store that knows when that is proved (`store/patient.py`).
    """
    loop, budget = asyncio.get_running_loop(), Budget(config.budget_bytes)
    groups = group_chunks(wanted, config.block_bytes)
    damage: list[list[DamagedError]] = [[] for _ in groups]

    async def read(group: Group, found: list[DamagedError]) -> None:
        async with budget.hold(group.nbytes):
            found += await read_now(group)

    async def read_now(group: Group) -> list[DamagedError]:
        buffer = np.empty(group.stop - group.start, dtype=np.uint8)
        try:
            await store.get_range(group.key, group.start, buffer.data)
        except (NotFoundError, DamagedError) as error:
            return [_lost(group, error)]
        found = await loop.run_in_executor(None, _deliver, group, buffer)
        on_bytes(buffer.nbytes)
        return found

    works = [partial(read, group, found) for group, found in zip(groups, damage, strict=True)]
    await run_workers(works, config.reads, lambda: None)
    return [error for found in damage for error in found]


def group_chunks(wanted: Iterable[Wanted], block_bytes: int) -> list[Group]:
    """Neighbouring chunks in reads of at most `block_bytes` (one chunk that is larger is read alone)."""
    groups: list[Group] = []
    for item in sorted(wanted, key=lambda w: (w.key, w.chunk.offset)):
        start, stop = item.chunk.offset, item.chunk.offset + item.chunk.stored
        last = groups[-1] if groups else None
        near = last is not None and last.key == item.key and start - last.stop <= GAP_BYTES_MAX
        if last is None or not near or stop - last.start > block_bytes:
            last = Group(item.key, start, stop)
            groups.append(last)
        last.stop = max(last.stop, stop)
        last.wanted.append(item)
    return groups


def _lost(group: Group, error: NotFoundError | DamagedError) -> DamagedError:
    first = group.wanted[0]
    fqn, rank = first.entry.fqn, first.rank
    return DamagedError(f"{error} (rank {rank}, {fqn})", key=group.key, fqn=fqn, rank=rank)


def _deliver(group: Group, buffer: Bytes) -> list[DamagedError]:
    """Verify each chunk of `group`, and hand over those that are whole."""
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


def decoded(chunk: Chunk, stored: Bytes) -> Bytes:
    """The raw bytes of `chunk`, verified (L1); CodecError where they are not what was saved."""
    if xxh3_64(stored) != chunk.checksum:
        raise CodecError(f"the checksum of {chunk.stored} stored bytes does not match")
    if chunk.codec == "raw" and chunk.raw == chunk.stored:
        raw = stored
    else:
        raw = np.empty(chunk.raw, dtype=np.uint8)
        decode_chunk(stored, codec=chunk.codec, raw_size=chunk.raw, out=raw)
    if xxh3_128(raw) != chunk.digest:
        raise CodecError(f"the digest of {chunk.raw} decoded bytes does not match")
    return raw
