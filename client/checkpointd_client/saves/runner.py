"""Drives one save from the snapshot to the decision: in this process, or by the sidecar.

Invariants
  RUNNER-1  A runner's `run` returns when the job has ended. It never raises: the handle gets the error.
  RUNNER-2  The slot is released once, when nobody reads it any more.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from checkpointd.commit.machine import Phase, shown
from checkpointd.errors import CheckpointdError, SupersededError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.meter import SaveMeter
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, Shard, ShardProgress
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.saves.history import SaveHistory, SaveRecord
from checkpointd_client.staging.arena import SlotHold

log = logging.getLogger("checkpointd")

RETURN_S = 1.0
"""How long the writer waits for save() to return once the snapshot has ended: a trainer that hangs must not delay the save."""
REFUSED_MAX = 16
"""So many saves that have failed without a writer may wait for the abort of their attempts and hold no slot."""
LEAVE_S = 5.0
"""How long uploads may take to end when the process closes."""


@dataclass(frozen=True, slots=True)
class PendingSave:
    """A save on its way to a runner: its names, its handle and its snapshot. `lease` is None if it has no slot."""

    info: AttemptInfo
    save: SaveRecord
    progress: ShardProgress
    staged: Future[Shard]
    lease: SlotHold | None = None
    shard: Shard | None = None
    """The result of `staged`, known before the copy ends."""
    announced: threading.Event = field(default_factory=threading.Event)
    """Set when the sidecar knows of the snapshot, which then outlives this process, or when no sidecar takes it."""
    begun: threading.Lock = field(default_factory=threading.Lock)
    """Taken for good by the first of two: the writer, which then runs the job, or a save() that was interrupted."""
    returned: Future[None] = field(default_factory=Future)
    """Resolved when save() returns. After that and the end of the snapshot, the save delays training no more."""

    async def snapshot(self) -> Shard:
        """Wait until the snapshot is whole, and return it; raises the error that spoiled it. Cancelling this harms nothing."""
        taken = asyncio.wrap_future(self.staged)
        taken.add_done_callback(lambda future: future.cancelled() or future.exception())  # also if this wait is cancelled
        return await asyncio.shield(taken)

    async def held_s(self) -> float:
        """How long the save delayed training. Call it when the snapshot has ended, which may be just before save() returns."""
        await asyncio.wait({asyncio.wrap_future(self.returned)}, timeout=RETURN_S)
        return self.save.handle.timings.held_s

    def free(self) -> None:
        """Release the slot: nobody reads it for this job any more."""
        if self.lease is not None:
            self.lease.release()

    async def free_when_copied(self) -> None:
        """Release the slot when the copy into it has ended, well or not."""
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
    """Records the end of each save in the history, the log, and `latest`, the newest tag that this process knows."""

    def __init__(self, history: SaveHistory, latest: str | None, measured: Callable[[OwnHandle], None]) -> None:
        self.history, self.latest, self._measured = history, latest, measured

    def entered(self, job: PendingSave, phase: Phase, error: CheckpointdError | None) -> None:
        """The save entered `phase`; a final phase ends it. A second end does nothing."""
        has_ended = False

        def end() -> None:
            nonlocal has_ended
            has_ended = True
            self.history.end(job.save, phase)
            self._measured(job.save.handle)
            if phase is Phase.COMMITTED and job.info.save_latest:
                self.latest = job.info.tag

        job.save.handle.advance(phase, error, end)
        if not has_ended:
            return
        if phase is Phase.COMMITTED:
            if job.info.rank == COORDINATOR:
                log.info("committed %s (step %d) %.1f s after save()", job.info.tag, job.info.step, job.save.handle.elapsed())
            return
        if phase is Phase.SKIPPED or isinstance(error, SupersededError):
            log.warning("%s", error)
        else:
            log.error("%s: %s", shown(phase, error.code if error else ""), error)


async def _held_over(job: PendingSave) -> Shard:
    """The snapshot, as soon as it is also known how long the save delayed training: the vote records that."""
    shard = await job.snapshot()
    await job.held_s()
    return shard


class InlineRunner:
    """Runs attempts on the writer of this process."""

    def __init__(self, state: WriterState, endings: Endings) -> None:
        self._state, self._endings = state, endings
        self._running: dict[asyncio.Task[Any], PendingSave] = {}
        self._refusing = 0

    async def run(self, job: PendingSave) -> None:
        await self.take(job)

    async def take(self, job: PendingSave, lost: ErrorReport | None = None) -> None:
        """Run the attempt. `lost`: why this process votes no for a sidecar that is lost, and writes nothing."""
        job.announced.set()
        if lost is None:
            job.progress.spent = SaveMeter(staging_s=job.save.handle.timings.staged_s)  # the snapshot may be whole by now

        def entered(phase: Phase) -> None:
            running = own()
            self._endings.entered(job, phase, None if running is None else running.error)

        attempt = Attempt(
            self._state,
            job.info,
            deadline=asyncio.get_running_loop().time() + job.left_s(self._state.commit.timeout_s),
            progress=job.progress,
            on_phase=entered,
            on_free=job.free,
            lost=lost,
        )
        own = weakref.ref(attempt)  # with `attempt` itself, a cycle would keep the snapshot's memory after close()
        job.save.voting = attempt
        task = asyncio.current_task()
        if task is not None:
            self._running[task] = job
        try:
            await attempt.run(_held_over(job) if lost is None else None)
        except Exception as error:  # a defect of ours must not hang the trainer that waits for the handle
            log.exception("%s: the writer failed in an unforeseen way; please report it", job.info.prefix)
            failed = CheckpointdError(f"the writer failed: {error!r}; please report it")
            self._endings.entered(job, Phase.FAILED, failed)
        finally:
            job.save.voting = None  # it holds the snapshot's memory
            if task is not None:
                self._running.pop(task, None)

    async def refuse(self, job: PendingSave, why: ErrorReport) -> None:
        """Vote no, unless the sidecar's yes stands, and end as the attempt ends. If many such attempts wait for their ends, the
        slot is kept until then, so that no trainer begins saves faster than they can end.
        """
        has_failed = replace(job, lease=None)
        self._refusing += 1
        try:
            if self._refusing <= REFUSED_MAX:
                await asyncio.gather(self.take(has_failed, why), job.free_when_copied())
                return
            try:
                await self.take(has_failed, why)
            finally:
                await job.free_when_copied()
        finally:
            self._refusing -= 1

    async def close(self, *, ends_well: bool) -> None:
        """Stop reading back, and leave what is in the spool to the next start."""
        left = [task for task, job in self._running.items() if job.save.handle.is_left]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LEAVE_S)
        await self._state.reader.close()
