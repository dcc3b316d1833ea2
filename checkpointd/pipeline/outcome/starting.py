"""The start of a job at a root: with a lease, and in one entry of the log with what is decided of older attempts."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from checkpointd.errors import RootInUseError
from checkpointd.layout.keys import LOG_ROOT
from checkpointd.layout.log_records import BeginRecord, LogState
from checkpointd.layout.manifest import encode
from checkpointd.pipeline.outcome.recover import Beyond, beyond, decided_now, make_again
from checkpointd.pipeline.root import leases, starts
from checkpointd.pipeline.root.leases import Beginner, HeldLease
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class TakenStart:
    """A start that this process has taken, its lease, and the state of the log before it."""

    start: BeginRecord
    lease: HeldLease
    before: LogState


async def begin(store: Store, beginner: Beginner) -> TakenStart:
    """Take the next start, with a lease that is renewed from now on. Every attempt at which somebody works is spared, but for
    those that the start before has fenced: the job has gone on without them. Makes a log again that is damaged, or
    older than what lies at the root.

    Raises RootInUseError if another job is alive (LEASE-5), NotFoundError if the log refuses `beginner.then`, and what
    `beginner.admits` raises. Waits at most a lease's length.
    """
    root_log, sight = RootLog.of(store), beginner.sight
    at_root = await store.list("")
    while True:
        before = await root_log.look(settles=True)
        if before.number and not root_log.root_id:
            words = (
                "%s of %s cannot be read: the root gets a new id. Do not put back its log from before, which has another one"
            )
            log.error(words, LOG_ROOT, store.url)
        strange = Beyond() if root_log.fault else await beyond(store, at_root, before)
        if root_log.fault or strange.later:
            before = await make_again(store, before, strange.later)
        beginner.admits(before)
        # Chosen before the look for living jobs: a job that begins meanwhile puts a lease of this number, and is noticed by it.
        newest = max(before.start, beginner.origin_begin[0], strange.start)
        number = max([newest + 1, *(number + 1 for number in await leases.job_numbers(store))])
        stranger, working = await asyncio.gather(
            leases.refusing(store, beginner), leases.attempts_at_work(store, sight, beginner.surviving)
        )
        if stranger is not None:
            raise RootInUseError(leases.refusal(store, stranger, beginner.instead))
        held = leases.of_job(store, number, beginner)
        if not await store.put_if_absent(held.key, encode(held.lease)):
            continue  # another job is taking this start
        held.keep(is_put=True)
        try:
            begun = msgspec.structs.replace(
                starts.new(store, number, beginner.world_size),
                spared=await starts.unfenced(store, dict.fromkeys((*beginner.surviving, *working))),
                commit_timeout_s=beginner.commit_timeout_s,
                job=beginner.job,
                process=sight.process,
                origin=beginner.origin,
                origin_begin=beginner.origin_begin,
            )
            decided = await decided_now(store, root_log.state, begun.spared)
            start = await starts.begin(store, begun, decided=decided, then=beginner.then, seen=before.start)
        except BaseException:
            await held.release()
            raise
        if start is not None:
            await leases.drop_older(store, number)
            return TakenStart(start, held, before)
        await held.release()
