"""Persists one shard: writes chunks, then the index, each durable before the next, and then puts the vote.

Invariants
  PERSIST-1  The vote is put only after the chunks objects and the index are durable.
  PERSIST-2  When `persist` returns or raises, no thread reads the buffer any more, so the slot may be reused.
  PERSIST-3  Memory beside the buffer stays below `budget_bytes`.
  PERSIST-5  An object of an attempt is never overwritten: a key that exists already is an error. If objects to which the shard
      refers prove condemned or damaged before the vote, the writer removes its own objects and writes the whole shard.
  PERSIST-4 and PERSIST-6 are in `vote.py`.
"""

from __future__ import annotations

import logging

from msgspec import structs

from checkpointd.commands import command
from checkpointd.config import LoadConfig
from checkpointd.errors import StoreError, StoreFullError
from checkpointd.layout.indexes import Index, encode_index
from checkpointd.layout.keys import index_name
from checkpointd.layout.manifest import Vote
from checkpointd.layout.tree import files_of
from checkpointd.phrases import byte_size
from checkpointd.pipeline.workers import aside
from checkpointd.pipeline.write.chunks import write_chunks
from checkpointd.pipeline.write.dedup import damaged, lost
from checkpointd.pipeline.write.files import write_files
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.vote import StoredShard, drop_shard, taken, vote_yes
from checkpointd.store.base import Store
from checkpointd.store.showing import plain_files_of

log = logging.getLogger("checkpointd")


async def persist(job: PersistJob) -> Vote:
    """Write the shard of `job` and vote yes. Returns the vote.

    Raises Stopped if `job` is stopped, else the error that struck, or that of this rank's no (`put_yes`).
    """
    try:
        stored = await _stored(job)
    except StoreFullError as error:
        progress, rank = job.progress, job.info.rank
        need = job.shard.nbytes - progress.raw_kept
        raise StoreFullError(
            f"{error}; rank {rank} has up to {byte_size(need)} to write for this save, and wrote {byte_size(progress.stored)}"
        ) from error
    job.check_stop()
    job.on_stored(structs.replace(stored.index, tree=b""))
    return await vote_yes(job, stored)


async def _stored(job: PersistJob) -> StoredShard:
    """Write the shard, durably, with references that stay valid until the attempt has an outcome (DEDUP-3 in `dedup.py`)."""
    stored = await write_shard(job)
    why = await lost(job.store, stored.index) or await _damaged(job, stored.index)
    if why is None:
        return stored
    log.warning(
        "%s: rank %d cannot refer to older chunks and writes everything anew: %s. If somebody removed files by hand, other "
        "checkpoints may have lost theirs: %s shows which",
        job.info.prefix,
        job.info.rank,
        why,
        command("list", job.store.url),
    )
    await drop_shard(job.store, job.info)
    job.progress.begin(job.shard.nbytes)
    return await write_shard(job.in_full())


async def _damaged(job: PersistJob, index: Index) -> str | None:
    if job.base is None or job.base.is_read:
        return None
    config = LoadConfig(block_bytes=job.config.block_bytes, budget_bytes=job.config.budget_bytes)
    try:
        return await damaged(job.store, job.info.prefix, index, config, lambda _: job.check_stop())
    except StoreError as error:
        return f"unchanged chunks cannot be read: {error}"


async def write_shard(job: PersistJob) -> StoredShard:
    """Write the chunks or files of the shard, then its index. Looks at no reference (DEDUP-3), and puts no vote."""
    info, files = job.info, files_of(job.shard.tree)
    index = await (write_chunks(job) if files is None else write_files(job, files))
    plain = plain_files_of(job.store)
    if info.unfinished and plain is not None:
        # All ranks had filled it when this save began. Each machine must make the files in its own cache durable.
        await plain.unfinished.settle(info.unfinished)
    ref, data = await aside(len(index.tensors), encode_index, index, index_name(info.rank))
    job.check_stop()
    with job.spent.disk.busy():
        await put_new(job.store, info.key(ref.name), data)
    return StoredShard(index, ref)


async def put_new(store: Store, key: str, data: bytes) -> None:
    if not await store.put_if_absent(key, data):
        raise taken(key)
