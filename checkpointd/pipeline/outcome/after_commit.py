"""What follows a commit before it is reported: its files are shown, and `latest` moves. Errors are logged, since it stands."""

from __future__ import annotations

import asyncio
import logging

from checkpointd.layout.log_records import CommitRecord
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import show
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")

SHOW_S = 5.0
"""How long other ranks wait for the coordinator to show the files of a commit."""


class Turns:
    """The attempts of one writer in the order of their saves: each is shown in its turn (TAGDIR-5). Use it on one loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._open: dict[str, tuple[int, asyncio.Event]] = {}
        """The attempts whose turn is not over, by prefix: the number of the save, and the event that ends the turn."""

    def expect(self, info: AttemptInfo) -> None:
        """Note that a save has begun. Its turn lasts until `end`, which must be called however the save ends."""
        self._open[info.prefix] = info.n, asyncio.Event()

    def end(self, info: AttemptInfo) -> None:
        """Note that the writer has shown the attempt, or will not show it."""
        _, over = self._open.pop(info.prefix, (0, asyncio.Event()))
        over.set()

    async def of(self, info: AttemptInfo) -> None:
        """Return when every earlier save has had its turn."""
        for number, over in list(self._open.values()):
            if number < info.n:
                await over.wait()


async def show_files(turns: Turns, info: AttemptInfo, commit: CommitRecord | None) -> None:
    """Show the files of a commit in its turn (TAGDIR-3). None: the attempt was aborted."""
    try:
        if commit is not None and commit.shown_at:
            await turns.of(info)
            # The coordinator shows them. Another rank does so only if it has waited in vain.
            await show(turns.store, commit, wait_s=0.0 if info.rank == COORDINATOR else SHOW_S)
    except Exception as why:  # ATTEMPT-1
        log.error("%s: committed, but its files cannot be shown: %s; the next save or start retries", info.prefix, why)
    finally:
        turns.end(info)


async def point_latest(root_log: RootLog, commit: CommitRecord) -> None:
    """Let `latest` name the newest checkpoint, after `commit`, if its save asked for that."""
    if not commit.save_latest:
        return
    try:
        await move_latest(root_log)
    except Exception as error:  # ATTEMPT-1
        log.error("%s: committed, but the move of latest failed: %s; the next start repairs it", commit.attempt, error)
