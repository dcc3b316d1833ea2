"""What follows a commit before it is reported: its files are shown, and `latest` moves. Errors are logged, since it stands."""

from __future__ import annotations

import logging

from checkpointd.layout.log_records import CommitRecord
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import Queue
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo

log = logging.getLogger("checkpointd")

SHOW_S = 5.0
"""How long other ranks wait for the coordinator to show the files of a commit."""


async def show_files(showing: Queue, info: AttemptInfo, commit: CommitRecord | None) -> None:
    """Show the files of a commit (TAGDIR-3). None: the attempt was aborted."""
    try:
        # The coordinator shows them. Another rank does so only if it has waited in vain.
        await showing.show(info, commit, wait_s=0.0 if info.rank == COORDINATOR else SHOW_S)
    except Exception as why:  # ATTEMPT-1
        log.error("%s: committed, but its files cannot be shown: %s; the next save or start retries", info.prefix, why)
    finally:
        showing.end(info)


async def point_latest(root_log: RootLog, commit: CommitRecord) -> None:
    """Let `latest` name the newest checkpoint, after `commit`, if its save asked for that."""
    if not commit.save_latest:
        return
    try:
        await move_latest(root_log)
    except Exception as error:  # ATTEMPT-1
        log.error("%s: committed, but the move of latest failed: %s; the next start repairs it", commit.attempt, error)
