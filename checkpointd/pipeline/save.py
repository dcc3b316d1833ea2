"""Persist one shard: chunks durable, then the index, then the vote.

Invariants
  P1  The vote is put only after the chunks objects and the index are durable.
  P2  When `persist` returns or raises, no thread reads the image any more: the slot may be reused.
  P3  Memory beside the image stays below `budget_bytes`.
  P4  Once the yes vote was tried, nothing that it names is removed by this rank.
  P5  An object of an attempt is written once; a key that exists already is an error, never overwritten. Where what a shard
      refers to turns out to be going, or damaged, before the vote, its own objects are removed and all of it is written.
  P6  A hand removes its own objects alone, and those only where this rank's vote does not name them. Where another hand may
      have voted (`AttemptInfo.handed`), the vote that stands is this rank's word, whoever put it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace

from checkpointd.config import LoadConfig
from checkpointd.errors import (
    ERRORS,
    AbortedError,
    CheckpointdError,
    DamagedError,
    NotFoundError,
    StoreError,
    UsageError,
)
from checkpointd.layout.indexes import encode_index
from checkpointd.layout.keys import (
    chunks_name,
    file_number,
    index_name,
    object_hand,
    object_rank,
    plan_key,
    vote_name,
)
from checkpointd.layout.manifest import LISTING_BYTES_MAX, BesideFile, ErrorReport, Index, IndexRef, Vote, digest, encode
from checkpointd.layout.plan import cover_fault
from checkpointd.layout.tree import files_of
from checkpointd.pipeline.catalog import read_vote
from checkpointd.pipeline.chunks import ENCODED_PART, RAW_PART, Persist, write_chunks
from checkpointd.pipeline.files import write_files
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.rates import KnownPlan
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.unchanged import damaged, lost, referred, trained
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


class VoteUncertain(StoreError):
    """Storing the yes vote failed, so it may be there or not: what it names must stay until there is an outcome."""


async def persist(job: Persist) -> Vote:
    """Write the shard of `job` and vote yes; the yes of this rank that stands, durable, which may be another hand's.

    Raises Stopped when told to stop, else the error that struck: that of another hand which voted no, too.
    """
    if job.info.hand:
        standing = await _standing_vote(job.store, job.info)
        if standing is not None:
            return _as_own(job.info, standing)
    plan = await _stored_plan(job)
    stored = await _stored(job, plan)
    job.check_stop()
    job.on_stored(stored.index)
    return await _vote_yes(job, stored, plan.digest)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A shard whose chunks and index are durable."""

    index: Index
    ref: IndexRef
    beside: tuple[BesideFile, ...] = ()
    """On rank 0, what others had filled for the directory above its files."""


async def _stored(job: Persist, plan: KnownPlan) -> _Stored:
    """The shard, durable, with references that hold until its attempt has an outcome (X3 in `unchanged.py`)."""
    stored = await _written(job, plan)
    why = await lost(job.store, stored.index) or await _damaged(job, stored.index)
    if why is None:
        return stored
    log.warning("%s: rank %d, which had referred to it, writes everything anew: %s", job.info.prefix, job.info.rank, why)
    await drop_shard(job.store, job.info)
    job.progress.begin(job.shard.nbytes)
    return await _written(replace(job, config=replace(job.config, dedup=False)), plan)


async def _damaged(job: Persist, index: Index) -> str | None:
    if job.base is None or job.base.is_read:
        return None
    config = LoadConfig(block_bytes=job.config.block_bytes, budget_bytes=job.config.budget_bytes)
    try:
        return await damaged(job.store, job.info.prefix, index, config, lambda _: job.check_stop())
    except StoreError as error:
        return f"what is unchanged cannot be read: {error}"


async def _written(job: Persist, plan: KnownPlan) -> _Stored:
    info, files = job.info, files_of(job.shard.tree)
    index = await (write_chunks(job) if files is None else write_files(job, files))
    beside: tuple[BesideFile, ...] = ()
    if info.unfinished and job.store.plain_files is not None:
        unfinished = job.store.plain_files.unfinished
        # All ranks had filled it when this save began; what another machine has in its cache, only that one makes durable.
        await unfinished.settle(info.unfinished)
        if info.rank == 0 and files is not None:
            filled = await unfinished.files(info.unfinished, os.path.dirname(files.at))
            beside = tuple(BesideFile(path, status.size, status.changed_ns) for path, status in sorted(filled.items()))
    fault = cover_fault(plan.plan, index)
    if fault:
        raise CheckpointdError(f"the index of rank {info.rank} is wrong: {fault}; this is a defect, please report it")
    job.check_stop()
    data = encode_index(index)
    _check_listing(f"index of {info.tag}", data)
    name = index_name(info.rank, info.hand)
    await put_new(job.store, info.key(name), data)
    return _Stored(index, IndexRef(name=name, size=len(data), digest=digest(data)), beside)


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


async def _vote_yes(job: Persist, stored: _Stored, plan_digest: str) -> Vote:
    info, index, files = job.info, stored.index, files_of(stored.index.tree)
    vote = Vote(
        tag=info.tag,
        attempt=str(info.attempt),
        rank=info.rank,
        world_size=info.world_size,
        step=info.step,
        n=info.n,
        save_latest=info.save_latest,
        vote="yes",
        index=stored.ref,
        plan=plan_digest,
        raw_bytes=job.shard.nbytes,
        stored_bytes=sum(c.stored for t in index.tensors for c in t.chunks),
        tensors=len(index.tensors),
        refers=referred(index),
        objects=tuple(ref for ref in index.objects if not ref.held_by),
        metrics=dict(info.metrics),
        trained=trained(index, job.base),
        files=None if files is None else tuple(file.name for file in files.files),
        shown_at="" if files is None else files.at,
        unfinished=info.unfinished,
        beside=stored.beside,
        writer=writer(),
    )
    try:
        standing = await _put_vote(job.store, info, vote)
    except CheckpointdError as error:
        raise VoteUncertain(f"the yes vote of rank {info.rank} could not be stored for certain: {error}") from error
    if standing != vote:
        await _drop_beaten(job.store, info)
    return _as_own(info, standing)


async def _put_vote(store: Store, info: AttemptInfo, vote: Vote) -> Vote:
    """Put `vote` if this rank has none; the vote that stands. StoreError where that is one of another process, not hand."""
    key, data = info.key(vote_name(info.rank)), encode(vote)
    if not info.handed:
        await put_new(store, key, data)
        return vote
    if await store.put_if_absent(key, data):
        return vote
    return _checked(info, await read_vote(store, key))


async def _standing_vote(store: Store, info: AttemptInfo) -> Vote | None:
    """This rank's vote by any hand, durable; None where there is none."""
    key = info.key(vote_name(info.rank))
    try:
        await store.settle(key)
        return _checked(info, await read_vote(store, key))
    except NotFoundError:
        return None


def _checked(info: AttemptInfo, vote: Vote) -> Vote:
    """`vote` if a hand of this rank can have cast it in this very save; StoreError where it cannot."""
    if (vote.tag, vote.attempt, vote.rank, vote.step, vote.n) != (
        info.tag,
        str(info.attempt),
        info.rank,
        info.step,
        info.n,
    ):
        raise _taken(info.key(vote_name(info.rank)))
    return vote


def _as_own(info: AttemptInfo, standing: Vote) -> Vote:
    """The standing vote where it is a yes; a no raises the error that it reports."""
    if standing.vote == "yes":
        return standing
    report = standing.error or ErrorReport(code="AbortedError", message="no reason was recorded")
    kind = ERRORS.get(report.code, AbortedError)
    raise kind(f"another writer of rank {info.rank} failed while {report.phase or 'at work'}: {report.message}")


def is_own(info: AttemptInfo, vote: Vote) -> bool:
    """Whether `vote`, a yes of this rank, is that of this very hand."""
    return vote.index is not None and vote.index.name == index_name(info.rank, info.hand)


async def vote_no(store: Store, info: AttemptInfo, error: ErrorReport) -> bool:
    """Drop what this hand wrote, which frees the space that a vote may need, then vote no.

    False where the yes of another hand stands.
    Where this rank has a vote already and no other hand can have cast it, another process runs as the same rank: what that
    vote names is not ours to drop (P4).
    """
    key = info.key(vote_name(info.rank))
    if not info.handed:
        try:
            await drop_unfinished(store, info)
        except CheckpointdError as refused:
            log.warning("%s: what was filled beside it stays for now: %s", info.prefix, refused)
    if await store.stat(key) is None:
        await drop_shard(store, info)
    elif info.handed:
        await drop_unless_named(store, info)
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
    if await store.put_if_absent(key, encode(vote)) or not info.handed:
        return True
    return _checked(info, await read_vote(store, key)).vote == "no"


async def drop_shard(store: Store, info: AttemptInfo) -> None:
    """Delete this hand's chunks and index of an attempt that will not be, or was not, committed with them."""
    parts = [chunks_name(info.rank, part, info.hand) for part in (RAW_PART, ENCODED_PART)]
    files = [entry.name for entry in await store.list(info.prefix) if file_number(entry.name) is not None]
    own = [name for name in files if (object_rank(name), object_hand(name)) == (info.rank, info.hand)]
    for name in (index_name(info.rank, info.hand), *parts, *own):
        await store.delete(info.key(name))


async def drop_unfinished(store: Store, info: AttemptInfo) -> None:
    """Remove the directory that was filled for an attempt that will not be, or was not, committed."""
    if info.unfinished and store.plain_files is not None:
        await store.plain_files.unfinished.discard(info.unfinished)


async def drop_unless_named(store: Store, info: AttemptInfo) -> None:
    """The same where this rank's vote stands and does not name this hand's index (P6); where there is none, nothing goes."""
    try:
        standing = await read_vote(store, info.key(vote_name(info.rank)))
    except (NotFoundError, DamagedError):
        return
    if not is_own(info, standing):
        await drop_shard(store, info)


async def _drop_beaten(store: Store, info: AttemptInfo) -> None:
    """What this hand wrote in vain; what cannot be removed now goes when the tag is tidied up."""
    try:
        await drop_unless_named(store, info)
    except CheckpointdError as error:
        log.warning("%s: what hand %d of rank %d wrote in vain stays for now: %s", info.prefix, info.hand, info.rank, error)


async def put_new(store: Store, key: str, data: bytes) -> None:
    if not await store.put_if_absent(key, data):
        raise _taken(key)


def _taken(key: str) -> StoreError:
    return StoreError(f"{key} exists already: another process writes the same attempt; is the job running twice as one rank?")
