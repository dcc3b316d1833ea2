"""Persist one shard: chunks durable, then the index, then the vote.

Invariants
  P1  The vote is put only after the chunks objects and the index are durable.
  P2  When `persist` returns or raises, no thread reads the image any more: the slot may be reused.
  P3  Memory beside the image stays below `budget_bytes`.
  P4  Once the yes vote was tried, nothing that it names is removed by this rank.
  P5  An object of an attempt is written once; a key that exists already is an error, never overwritten.
"""

from __future__ import annotations

import logging

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError, UsageError
from checkpointd.layout.keys import chunks_name, index_name, plan_key, vote_name
from checkpointd.layout.manifest import LISTING_BYTES_MAX, ErrorReport, Index, IndexRef, Vote, digest, encode, encode_index
from checkpointd.layout.plan import cover_fault
from checkpointd.pipeline.chunks import ENCODED_PART, RAW_PART, Persist, write_chunks
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.rates import KnownPlan
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


class VoteUncertain(StoreError):
    """Storing the yes vote failed, so it may be there or not: what it names must stay until there is an outcome."""


async def persist(job: Persist) -> Vote:
    """Write the shard of `job` and vote yes. Raises Stopped when told to stop, else the error that struck."""
    plan = await _stored_plan(job)
    index = await write_chunks(job)
    fault = cover_fault(plan.plan, index)
    if fault:
        raise CheckpointdError(f"the index of rank {job.info.rank} is wrong: {fault}; this is a defect, please report it")
    job.check_stop()
    return await _vote_yes(job, index, plan.digest)


async def _stored_plan(job: Persist) -> KnownPlan:
    """The plan of this shard, durable in the store; remembered while the layout stays the same."""
    known = job.rates.plan
    if known is not None and known.tensors is job.shard.tensors:
        return known
    plan = job.shard.plan(job.info)
    data = encode(plan)
    _check_listing(f"plan of {job.info.tag}", data)
    known = KnownPlan(job.shard.tensors, plan, digest(data))
    key = plan_key(known.digest)
    if not await job.store.put_if_absent(key, data) and not await _holds(job.store, key, data):
        log.error("%s is damaged; it is written again, since its name is the digest of what belongs there", key)
        await job.store.put(key, data)
    job.rates.plan = known
    return known


async def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return await store.get(key, size_max=len(data)) == data
    except (DamagedError, NotFoundError):
        return False


def _check_listing(what: str, data: bytes) -> None:
    if len(data) > LISTING_BYTES_MAX:
        raise UsageError(f"the {what} has {len(data)} bytes, more than {LISTING_BYTES_MAX}: use larger chunks or fewer tensors")


async def _vote_yes(job: Persist, index: Index, plan_digest: str) -> Vote:
    info, data = job.info, encode_index(index)
    _check_listing(f"index of {info.tag}", data)
    await put_new(job.store, info.key(index_name(info.rank)), data)
    job.check_stop()
    vote = Vote(
        tag=info.tag,
        attempt=str(info.attempt),
        rank=info.rank,
        world_size=info.world_size,
        step=info.step,
        n=info.n,
        save_latest=info.save_latest,
        vote="yes",
        index=IndexRef(name=index_name(info.rank), size=len(data), digest=digest(data)),
        plan=plan_digest,
        raw_bytes=job.shard.nbytes,
        stored_bytes=sum(c.stored for t in index.tensors for c in t.chunks),
        tensors=len(index.tensors),
        writer=writer(),
    )
    try:
        await put_new(job.store, info.key(vote_name(info.rank)), encode(vote))
    except CheckpointdError as error:
        raise VoteUncertain(f"the yes vote of rank {info.rank} could not be stored for certain: {error}") from error
    return vote


async def vote_no(store: Store, info: AttemptInfo, error: ErrorReport) -> None:
    """Drop what this rank wrote, which frees the space that a vote may need, then vote no.

    Where this rank has a vote already, another process runs as the same rank: what that vote names is not ours to drop (P4).
    """
    key = info.key(vote_name(info.rank))
    if await store.stat(key) is None:
        await drop_shard(store, info)
    vote = Vote(
        tag=info.tag,
        attempt=str(info.attempt),
        rank=info.rank,
        world_size=info.world_size,
        step=info.step,
        n=info.n,
        save_latest=info.save_latest,
        vote="no",
        error=error,
        writer=writer(),
    )
    await store.put_if_absent(key, encode(vote))


async def drop_shard(store: Store, info: AttemptInfo) -> None:
    """Delete this rank's chunks and index of an attempt that will not be, or was not, committed."""
    for name in (index_name(info.rank), chunks_name(info.rank, RAW_PART), chunks_name(info.rank, ENCODED_PART)):
        await store.delete(info.key(name))


async def put_new(store: Store, key: str, data: bytes) -> None:
    if not await store.put_if_absent(key, data):
        raise StoreError(
            f"{key} exists already: another process writes the same attempt; is the job running twice as one rank?"
        )
