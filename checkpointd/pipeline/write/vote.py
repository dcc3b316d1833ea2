"""Stage 8 of a save: this rank's vote, and the removal of its objects if the save has failed.

Invariants
  PERSIST-4  Once this rank has tried to put its yes vote, it removes no object that the vote names.
  PERSIST-6  A rank has one vote, and the first that is put counts. Only the writer of the shard puts a yes. A trainer that has
      lost its sidecar puts a no, and the sidecar may be alive. So the trainer removes the shard only after the abort: before
      that, the sidecar's yes may stand.
  PERSIST-7  A vote is visible, and not durable. No commit needs it, since the ballot has the bytes of every vote (COMMIT-4).
      If a power cut takes the vote of an undecided attempt away or tears it, the attempt is aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from checkpointd.errors import AbortedError, CheckpointdError, NotFoundError, StoreError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import chunks_name, group_prefix, index_name, object_rank, rank_group, vote_name
from checkpointd.layout.manifest import NO_REASON, ErrorReport, IndexRef, Vote, encode
from checkpointd.layout.tree import files_of
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.read.contents import content_of
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.root_view import read_vote
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.pipeline.workers import aside
from checkpointd.pipeline.write.dedup import referred, trained
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.place import ENCODED_OBJECT, RAW_OBJECT
from checkpointd.store.base import Store
from checkpointd.store.showing import plain_files_of

log = logging.getLogger("checkpointd")


class VoteUncertain(StoreError):
    """Storing the yes vote failed, so the vote may exist or not. The objects that it names must stay until the outcome."""


@dataclass(frozen=True, slots=True)
class StoredShard:
    """A shard whose chunks and index are durable."""

    index: Index
    ref: IndexRef


async def vote_yes(job: PersistJob, stored: StoredShard) -> Vote:
    """Vote yes for the `stored` shard. Returns the vote; raises as `put_yes`."""
    vote = await yes_vote(job, stored)
    await job.before_vote()
    await put_yes(job.store, job.info, vote)
    return vote


async def yes_vote(job: PersistJob, stored: StoredShard) -> Vote:
    """The yes vote for the `stored` shard, which is not put."""
    job.spent.voted()
    return await aside(len(stored.index.tensors), _yes, job, stored)


async def put_yes(store: Store, info: AttemptInfo, vote: Vote) -> None:
    """Put the yes `vote`, unless it is there. If this rank has voted no, raises the error that the no reports. Raises
    VoteUncertain if the store fails, or if another process runs as this rank.
    """
    key, data = info.key(vote_name(info.rank)), encode(msgspec.structs.replace(vote, root=RootLog.of(store).root_id))
    try:
        if await store.put_if_absent(key, data, durable=False):  # PERSIST-7
            return
        standing = await _standing(store, info, vote)
    except CheckpointdError as error:
        raise VoteUncertain(f"the yes vote of rank {info.rank} could not be stored for certain: {error}") from error
    _check_yes(standing)


async def has_voted(store: Store, info: AttemptInfo, vote: Vote) -> bool:
    """Whether the yes `vote` of this rank is there. Raises as `put_yes` if there is another one, but no VoteUncertain."""
    try:
        standing = await _standing(store, info, vote)
    except NotFoundError:
        return False
    _check_yes(standing)
    return True


async def _standing(store: Store, info: AttemptInfo, vote: Vote) -> Vote:
    """The vote of this rank: the yes `vote`, or a no. Raises StoreError for one of another process that runs as this rank."""
    standing = await _own(store, info)
    if standing.vote == "yes" and standing.index != vote.index:
        raise taken(info.key(vote_name(info.rank)))
    return standing


async def _own(store: Store, info: AttemptInfo) -> Vote:
    standing = await read_vote(store, info.key(vote_name(info.rank)))
    if (standing.prefix, standing.rank, standing.step, standing.n) != (info.prefix, info.rank, info.step, info.n):
        raise taken(info.key(vote_name(info.rank)))
    return standing


def _check_yes(standing: Vote) -> None:
    if standing.vote == "no":
        report = standing.error or NO_REASON
        raise report.error(f"rank {standing.rank} has voted no: {report.message}", unknown=AbortedError)


def _vote(info: AttemptInfo, **said: Any) -> Vote:
    return Vote(
        tag=info.tag,
        attempt=str(info.attempt),
        rank=info.rank,
        world_size=info.world_size,
        step=info.step,
        n=info.n,
        save_latest=info.save_latest,
        inline=info.inline,
        writer=writer(),
        **said,
    )


def _yes(job: PersistJob, stored: StoredShard) -> Vote:
    info, index, files = job.info, stored.index, files_of(stored.index.tree)
    return _vote(
        info,
        vote="yes",
        index=stored.ref,
        raw_bytes=job.shard.nbytes,
        stored_bytes=sum(c.stored for t in index.tensors for c in t.chunks),
        tensors=len(index.tensors),
        refers=referred(index),
        objects=tuple(ref for ref in index.objects if not ref.held_by),
        metrics=dict(info.metrics),
        left=info.left,
        trained=trained(index, job.base),
        files=None if files is None else tuple(file.name for file in files.files),
        shown_at=info.shown_at if files is None else files.at,
        unfinished=info.unfinished,
        held_s=round(job.progress.held_s, 6),
        seconds=job.spent.seconds(),
        content=content_of(index) if files is None and info.world_size > 1 else None,
    )


async def vote_no(store: Store, info: AttemptInfo, error: ErrorReport, *, has_written: bool = True) -> bool:
    """Vote no, unless this rank has a vote. Returns False if that is a yes, so that the attempt may commit.

    If this process `has_written` the shard, it is removed first, which frees the space that a vote may need. Without it, a
    sidecar has written it, and may vote until the no is there (PERSIST-6).
    """
    key = info.key(vote_name(info.rank))
    if has_written:
        try:
            await drop_unfinished(store, info)
        except CheckpointdError as refused:
            log.warning("%s: its unfinished directory stays for now: %s", info.prefix, refused)
        if await store.stat(key) is None:  # else the vote may name the objects (PERSIST-4)
            await drop_shard(store, info)
    vote = _vote(info, vote="no", root=RootLog.of(store).root_id, error=error)
    if await store.put_if_absent(key, encode(vote), durable=False):
        return True
    return (await _own(store, info)).vote == "no"


async def drop_shard(store: Store, info: AttemptInfo) -> None:
    """Delete the chunks, files and index of this rank in an attempt that does not commit with them."""
    parts = [chunks_name(info.rank, part) for part in (RAW_OBJECT, ENCODED_OBJECT)]
    entries = await store.list(group_prefix(info.prefix, rank_group(info.rank)))
    files = [entry.name for entry in entries if entry.name.endswith(".file") and object_rank(entry.name) == info.rank]
    for name in (index_name(info.rank), *parts, *files):
        await store.delete(info.key(name))


async def drop_unfinished(store: Store, info: AttemptInfo) -> None:
    """Remove the directory that was filled for an attempt that does not commit."""
    plain = plain_files_of(store)
    if info.unfinished and plain is not None:
        await plain.unfinished.discard(info.unfinished)


async def tried(drop: Callable[[Store, AttemptInfo], Awaitable[None]], store: Store, info: AttemptInfo) -> None:
    """Remove the unused objects of this rank by `drop`, as far as possible: the coordinator may have tidied up before they were
    written.
    """
    try:
        await drop(store, info)
    except Exception as error:  # ATTEMPT-1
        log.warning("%s: leftovers could not be removed: %s; the next start tries again", info.prefix, error)


def taken(key: str) -> StoreError:
    """The error for an object of this rank that exists already."""
    return StoreError(f"{key} exists already: another process writes the same attempt; is the job running twice as one rank?")
