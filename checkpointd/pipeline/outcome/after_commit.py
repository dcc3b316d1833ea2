"""What follows a commit before it is reported: its files are shown, and `latest` moves. Errors are logged, since it stands."""

from __future__ import annotations

import logging

from checkpointd.layout.manifest import Branches, Outcome
from checkpointd.pipeline.outcome.branches import leave_by_commit
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.tag_directories import Queue
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

SHOW_S = 5.0
"""How long other ranks wait for the coordinator to show the files of a commit."""


async def show_files(showing: Queue, info: AttemptInfo, outcome: Outcome) -> None:
    """Show the files of a commit (TAGDIR-3)."""
    try:
        # The coordinator shows them. Another rank does so only if it has waited in vain.
        await showing.show(info, outcome, wait_s=0.0 if info.rank == COORDINATOR else SHOW_S)
    except Exception as why:  # ATTEMPT-1
        log.error("%s: committed, but its files cannot be shown: %s; the next save or start retries", info.prefix, why)
    finally:
        showing.end(info)


async def follow_commit(store: Store, outcome: Outcome, recorded: set[Branches]) -> None:
    """After a commit, record which checkpoints its branch has left, and move `latest` to it if it asked for that. `recorded`:
    the branches whose checkpoints have their records.
    """
    if outcome.outcome != "commit":
        return
    if outcome.left and outcome.left not in recorded:
        await leave_by_commit(store, outcome)
        recorded.add(outcome.left)
    if outcome.save_latest:
        await _point_latest(store, outcome)


async def _point_latest(store: Store, outcome: Outcome) -> None:
    try:
        await move_latest(store, outcome.tag, outcome.order)
    except Exception as error:  # ATTEMPT-1
        log.error("%s: committed, but the move of latest failed: %s; the next start repairs it", outcome.prefix, error)
