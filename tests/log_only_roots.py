"""Roots of which only the log matters, written record by record: far quicker than saves, but nothing of them can be loaded."""

from __future__ import annotations

from typing import Any

from checkpointd.layout.ballot import encode_ballot
from checkpointd.layout.log_records import AnnounceRecord, CommitRecord
from checkpointd.layout.manifest import WriterIdentity
from checkpointd.layout.save_timings import Cost
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store

WRITER = WriterIdentity(host="node1", pid=17, time="2026-01-02T03:04:05.678Z")
BALLOT, BALLOT_BYTES = encode_ballot([b"{}"])


def commit_of(tag: str, step: int, *, start: int = 1, k: int = 0, **others: Any) -> CommitRecord:
    """The commit of an attempt at `tag` by one rank. `others`: fields of CommitRecord, in place of the usual ones."""
    usual: dict[str, Any] = {
        "attempt": f"{tag}/{start:08d}-{k}",
        "n": step,
        "step": step,
        "world_size": 1,
        "ballot": BALLOT,
        "cost": Cost(took_s=1.0, held_s=0.1, raw_bytes=1000, stored_bytes=900, written_bytes=900),
        "decided_by": 0,
        "writer": WRITER,
    }
    return CommitRecord(**(usual | others))


async def logged_root(store: Store, *commits: CommitRecord, world_size: int = 1) -> RootLog:
    """A root whose log has these checkpoints. Their starts are begun, their ballots are there, which hold no votes, and
    `latest` names the newest.
    """
    log = RootLog.of(store)
    for start in sorted({commit.id.start for commit in commits} | {1}):
        while await starts.newest(store) < start:
            await starts.take(store, world_size)
        own = [commit for commit in commits if commit.id.start == start]
        announced = [AnnounceRecord(attempt=commit.attempt, n=commit.n, step=commit.step) for commit in own]
        refused = await log.add(*announced, *own)
        assert not refused, refused
    for commit in commits:
        await store.put(f"{commit.attempt}/ballot-{BALLOT.digest}", BALLOT_BYTES)
    await move_latest(log)
    return log
