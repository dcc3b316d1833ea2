"""Stage 8 of a save: this rank's vote, and the removal of its objects if the save has failed.

Invariants
  PERSIST-4  Once this rank has tried to put its yes vote, it removes no object that the vote names.
  PERSIST-6  A writer removes only its own objects, and only if this rank's vote does not name them. If another writer may have
      voted (`AttemptInfo.may_be_taken_over`), the stored vote is this rank's vote, whichever writer put it.
  PERSIST-7  A vote is visible, and not durable. No commit needs it, since the ballot has the bytes of every vote (COMMIT-4).
      If a power cut takes the vote of an undecided attempt away or tears it, the attempt is aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from checkpointd.errors import AbortedError, CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.layout.indexes import Index
from checkpointd.layout.keys import chunks_name, group_prefix, index_name, object_rank, object_takeover, rank_group, vote_name
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
    """Vote yes for the `stored` shard. Returns the rank's yes vote, which may be another writer's."""
    vote = await yes_vote(job, stored)
    await job.before_vote()
    return await put_yes(job.store, job.info, vote)


async def yes_vote(job: PersistJob, stored: StoredShard) -> Vote:
    """The yes vote for the `stored` shard, which is not put."""
    job.spent.voted()
    return await aside(len(stored.index.tensors), _yes, job, stored)


async def put_yes(store: Store, info: AttemptInfo, vote: Vote) -> Vote:
    """Put the yes `vote` unless this rank has a vote. Returns the rank's yes vote, which may be another writer's."""
    vote = msgspec.structs.replace(vote, root=RootLog.of(store).root_id)
    try:
        standing = await _put_vote(store, info, vote)
    except CheckpointdError as error:
        raise VoteUncertain(f"the yes vote of rank {info.rank} could not be stored for certain: {error}") from error
    if standing != vote:
        await _drop_beaten(store, info)
    return as_own(info, standing)


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


async def _put_vote(store: Store, info: AttemptInfo, vote: Vote) -> Vote:
    """Put `vote` if this rank has none. Returns the rank's vote. Raises StoreError if a process that is not a writer of this
    save put it.
    """
    key, data = info.key(vote_name(info.rank)), encode(vote)
    if not info.may_be_taken_over:
        await put_new(store, key, data, durable=False)  # PERSIST-7
        return vote
    if await store.put_if_absent(key, data, durable=False):
        return vote
    return _checked(info, await read_vote(store, key))


async def standing_vote(store: Store, info: AttemptInfo) -> Vote | None:
    """This rank's vote by any writer; None if there is none."""
    try:
        return _checked(info, await read_vote(store, info.key(vote_name(info.rank))))
    except NotFoundError:
        return None


def _checked(info: AttemptInfo, vote: Vote) -> Vote:
    """`vote`, if a writer of this rank and this save can have put it. Raises StoreError if not."""
    if (vote.prefix, vote.rank, vote.step, vote.n) != (info.prefix, info.rank, info.step, info.n):
        raise _taken(info.key(vote_name(info.rank)))
    return vote


def as_own(info: AttemptInfo, standing: Vote) -> Vote:
    """The rank's vote `standing` if it is a yes. A no raises the error that it reports."""
    if standing.vote == "yes":
        return standing
    report = standing.error or NO_REASON
    message = f"another writer of rank {info.rank} failed while {report.phase or 'at work'}: {report.message}"
    raise report.error(message, unknown=AbortedError)


def is_own(info: AttemptInfo, vote: Vote) -> bool:
    """Whether this writer put `vote`, a yes of this rank."""
    return vote.index is not None and vote.index.name == index_name(info.rank, info.takeover)


async def vote_no(store: Store, info: AttemptInfo, error: ErrorReport) -> bool:
    """Remove this writer's objects, which frees the space that a vote may need, and vote no.

    Returns False if another writer of this rank has voted yes. If this rank has a vote and can have no other writer, another
    process runs as the same rank. The objects that its vote names stay (PERSIST-4).
    """
    key = info.key(vote_name(info.rank))
    if not info.may_be_taken_over:
        try:
            await drop_unfinished(store, info)
        except CheckpointdError as refused:
            log.warning("%s: its unfinished directory stays for now: %s", info.prefix, refused)
    if await store.stat(key) is None:
        await drop_shard(store, info)
    elif info.may_be_taken_over:
        await drop_unless_named(store, info)
    vote = _vote(info, vote="no", root=RootLog.of(store).root_id, error=error)
    if await store.put_if_absent(key, encode(vote), durable=False) or not info.may_be_taken_over:
        return True
    return _checked(info, await read_vote(store, key)).vote == "no"


async def drop_shard(store: Store, info: AttemptInfo) -> None:
    """Delete the chunks, files and index that this writer wrote for an attempt that does not commit with them."""
    parts = [chunks_name(info.rank, part, info.takeover) for part in (RAW_OBJECT, ENCODED_OBJECT)]
    entries = await store.list(group_prefix(info.prefix, rank_group(info.rank)))
    files = [entry.name for entry in entries if entry.name.endswith(".file")]
    own = [name for name in files if (object_rank(name), object_takeover(name)) == (info.rank, info.takeover)]
    for name in (index_name(info.rank, info.takeover), *parts, *own):
        await store.delete(info.key(name))


async def drop_unfinished(store: Store, info: AttemptInfo) -> None:
    """Remove the directory that was filled for an attempt that does not commit."""
    plain = plain_files_of(store)
    if info.unfinished and plain is not None:
        await plain.unfinished.discard(info.unfinished)


async def tried(drop: Callable[[Store, AttemptInfo], Awaitable[None]], store: Store, info: AttemptInfo) -> None:
    """Remove this writer's unused objects by `drop`, as far as possible: the coordinator may have tidied up before this writer
    wrote them.
    """
    try:
        await drop(store, info)
    except Exception as error:  # ATTEMPT-1
        log.warning("%s: leftovers could not be removed: %s; the next start tries again", info.prefix, error)


async def drop_unless_named(store: Store, info: AttemptInfo) -> None:
    """Do `drop_shard` if this rank has a vote that does not name this writer's index (PERSIST-6). Without a vote, do
    nothing."""
    try:
        standing = await read_vote(store, info.key(vote_name(info.rank)))
    except (NotFoundError, DamagedError):
        return
    if not is_own(info, standing):
        await drop_shard(store, info)


async def _drop_beaten(store: Store, info: AttemptInfo) -> None:
    """Remove the objects of a writer that lost the race for the vote. If that fails, they go when the tag is tidied up."""
    try:
        await drop_unless_named(store, info)
    except CheckpointdError as error:
        log.warning(
            "%s: unused objects of takeover %d of rank %d stay for now: %s", info.prefix, info.takeover, info.rank, error
        )


async def put_new(store: Store, key: str, data: bytes, *, durable: bool = True) -> None:
    if not await store.put_if_absent(key, data, durable=durable):
        raise _taken(key)


def _taken(key: str) -> StoreError:
    return StoreError(f"{key} exists already: another process writes the same attempt; is the job running twice as one rank?")
