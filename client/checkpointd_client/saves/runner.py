"""Drives one save from the snapshot to the outcome: in this process, or by the sidecar.

Invariants
  RUNNER-1  A runner's `run` returns when the job has ended; it never raises. The error belongs to the handle.
  RUNNER-2  The slot is released once, when nobody reads it any more.
  RUNNER-3  A snapshot is persisted only while its slot is held: what is released holds another save's bytes soon.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Protocol

from checkpointd.commit.machine import FINAL, ORDER, Phase, reached, shown
from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.meter import SaveMeter
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress
from checkpointd_client.saves.history import SaveHistory, SaveRecord
from checkpointd_client.staging.arena import SlotHold

log = logging.getLogger("checkpointd")

RETURN_S = 1.0
"""How long save(), which has nothing left to do, may take to return: a trainer that hangs holds up no save."""


@dataclass(frozen=True, slots=True)
class PendingSave:
    """Who the save is, its handle, and the snapshot that will come. `lease` is None where there is none to come."""

    info: AttemptInfo
    save: SaveRecord
    progress: ShardProgress
    staged: Future[Shard]
    lease: SlotHold | None = None
    shard: Shard | None = None
    """What `staged` will give."""
    announced: threading.Event = field(default_factory=threading.Event)
    """Set when a snapshot that gets whole from here on needs this process no more, or when that is not to be had."""
    returned: Future[None] = field(default_factory=Future)
    """Resolved when save() returns: once the snapshot has ended, too, the save holds training no more."""

    async def snapshot(self) -> Shard:
        """The snapshot, once it is whole; raises what spoiled it. Giving up on this leaves it to others."""
        taken = asyncio.wrap_future(self.staged)
        taken.add_done_callback(lambda future: future.cancelled() or future.exception())  # somebody else looks at it, then
        return await asyncio.shield(taken)

    async def held_s(self) -> float:
        """How long the save held training. Asked when the snapshot has ended, which may be a moment before save() returns."""
        await asyncio.wait({asyncio.wrap_future(self.returned)}, timeout=RETURN_S)
        return self.save.handle.timings.held_s

    @property
    def has_snapshot(self) -> bool:
        """Whether the snapshot is there, or still comes, or was spoiled; one whose slot was released is gone."""
        spoiled = self.staged.done() and self.staged.exception() is not None
        return spoiled or self.lease is None or self.lease.wanted

    def free(self) -> None:
        """Nobody reads the slot for this job any more."""
        if self.lease is not None:
            self.lease.release()

    async def free_when_copied(self) -> None:
        """The same, once the copy into the slot is over, however it ended."""
        if self.lease is not None:
            self.lease.wanted = False
        try:
            await self.snapshot()
        except Exception as error:
            log.debug("%s: the snapshot that nobody needs failed: %s", self.info.prefix, error)
        self.free()

    def left_s(self, timeout_s: float) -> float:
        """Seconds until the attempt's deadline, `timeout_s` after save() was called."""
        return max(0.0, self.save.began + timeout_s - time.monotonic())


class Runner(Protocol):
    """Brings jobs to their end."""

    async def run(self, job: PendingSave) -> None: ...

    async def close(self, *, ends_well: bool) -> None: ...


class Endings:
    """What the end of a save does to the history, the log, and the newest tag that is known here."""

    def __init__(self, history: SaveHistory, latest: str | None) -> None:
        self.history, self.latest = history, latest

    def entered(self, job: PendingSave, phase: Phase, error: CheckpointdError | None) -> None:
        """The save entered `phase`; a final one ends it. A second end does nothing.

        A writer that takes over begins again; what the save has reached, it has reached.
        """
        if _is_behind(phase, job.save.handle.phase):
            return
        job.save.handle.advance(phase, error)
        if phase not in FINAL or not self.history.end(job.save, phase):
            return
        if phase is Phase.COMMITTED:
            self.latest = job.info.tag if job.info.save_latest else self.latest
        elif phase is Phase.SKIPPED:
            log.warning("%s", error)
        else:
            log.error("%s: %s", shown(phase, error.code if error else ""), error)


async def _held_over(job: PendingSave) -> Shard:
    """The snapshot, once it is also known how long the save held training, which the vote tells."""
    shard = await job.snapshot()
    await job.held_s()
    return shard


def _is_behind(phase: Phase, now: str) -> bool:
    return phase in ORDER and now in ORDER and reached(Phase(now), phase)


class InlineRunner:
    """Runs attempts on the writer of this process."""

    def __init__(self, state: WriterState, endings: Endings) -> None:
        self._state, self._endings = state, endings

    async def run(self, job: PendingSave) -> None:
        await self.take(job, job.info, left_s=job.left_s(self._state.commit.timeout_s))

    async def take(self, job: PendingSave, info: AttemptInfo, *, left_s: float) -> None:
        """Run the attempt as the writer that `info` names, with `left_s` until its deadline."""
        job.announced.set()
        job.progress.begin(0)  # what the writer before had written is not this one's
        job.progress.told, job.progress.spent = None, SaveMeter(staging_s=job.save.handle.timings.staged_s)
        attempt = Attempt(
            self._state,
            info,
            deadline=asyncio.get_running_loop().time() + left_s,
            progress=job.progress,
            on_phase=lambda phase: self._endings.entered(job, phase, attempt.error),
            on_free=job.free,
        )
        job.save.voting = attempt
        try:
            await attempt.run(_held_over(job))
        except Exception as error:  # a defect of ours must not hang the trainer that waits for the handle
            log.exception("%s: the writer failed in an unforeseen way; please report it", info.prefix)
            failed = CheckpointdError(f"the writer failed: {error!r}; please report it")
            self._endings.entered(job, Phase.FAILED, failed)
        finally:
            job.save.voting = None  # it holds the snapshot's memory

    async def refuse(self, job: PendingSave, error: CheckpointdError, *, takeover: int, left_s: float) -> None:
        """Vote no with `error`, unless another writer has voted, and end as the attempt ends."""
        job.announced.set()
        refused: Future[Shard] = Future()
        refused.set_exception(error)
        info = replace(job.info, takeover=takeover, may_be_taken_over=True)
        await asyncio.gather(self.take(replace(job, staged=refused, lease=None), info, left_s=left_s), job.free_when_copied())

    async def close(self, *, ends_well: bool) -> None:
        """Give up what is not read back yet."""
        await self._state.reader.close()
