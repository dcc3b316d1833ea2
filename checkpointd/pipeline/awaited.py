"""Describes the wait of an attempt, for the log of long waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from checkpointd.commit.decide import awaited_words
from checkpointd.commit.machine import IN_SPOOL, Phase
from checkpointd.pipeline.shard import AttemptInfo, ShardProgress
from checkpointd.waits import Waiting


async def stirred(event: asyncio.Event, seconds: float) -> bool:
    """Wait for `event`, and clear it; False if it does not come within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    event.clear()
    return True


class Awaited:
    """The wait of one rank's attempt. It starts again at each new phase, each byte on the disk and each vote."""

    def __init__(self, info: AttemptInfo, progress: ShardProgress) -> None:
        self._info, self._progress = info, progress
        self._since: tuple[object, Waiting] | None = None

    def look(self, phase: Phase, votes_missing: Sequence[int] | None, *, stands_in: bool) -> None:
        """Call this at every look for the outcome. `votes_missing`: None if this rank gathers no votes. `stands_in`: this rank
        has announced the attempt in place of the coordinator, which may never have called save().
        """
        point = (phase, self._progress.raw_done, self._progress.uploaded, len(votes_missing or ()))
        if self._since is None or self._since[0] != point:
            # The coordinator's log names the missing votes, so a thousand other ranks need not warn, too. If it is the
            # coordinator that is missing, the one rank that stands in for it warns.
            is_others = votes_missing is None and not stands_in and phase not in {Phase.STAGING, Phase.STAGED, Phase.PERSISTING}
            level = logging.INFO if is_others or phase in IN_SPOOL else logging.WARNING
            self._since = (
                point,
                Waiting(lambda: self._words(phase, votes_missing), clock=asyncio.get_running_loop().time, level=level),
            )
        self._since[1].look()

    def _words(self, phase: Phase, votes_missing: Sequence[int] | None) -> str:
        rank, progress = self._info.rank, self._progress
        if phase is Phase.STAGING:
            why = f"the snapshot of rank {rank} is not whole"
        elif phase in {Phase.STAGED, Phase.PERSISTING}:
            why = f"rank {rank} has {progress.raw_done} of {progress.raw_total} bytes on the disk; the storage takes no more"
        elif phase is Phase.SPOOLED:
            why = f"the shard of rank {rank} is durable in the spool, and waits for its upload"
        elif phase is Phase.UPLOADING:
            why = f"rank {rank} has uploaded {progress.uploaded} of {progress.upload_total} bytes"
        else:
            why = awaited_words(votes_missing)
        return f"{self._info.prefix}: {why}"
