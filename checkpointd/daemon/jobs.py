"""The saves that the daemon works at: each runs the same `Attempt` as the in-process writer, and outlives its client.

Invariants
  J1  One job per (root, epoch's nonce, tag, attempt, rank): a client that comes back is attached to the job that there is.
  J2  A snapshot is persisted only after its client said that it is whole; one whose client died before votes no.
  J3  A slot is read until the job has left it, whatever becomes of the client.
  J4  A job that has ended holds no memory of the snapshot any more: what is remembered of it is plain data.
  J5  While the coordinator's snapshot is whole and its attempt undecided, the attempt has a lease, which is renewed: a start
      that cannot ask this daemon leaves the attempt to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from checkpointd.commit.machine import FINAL, Phase, shown
from checkpointd.daemon.memory import SlotMemory
from checkpointd.daemon.status import SaveStatus
from checkpointd.errors import CheckpointdError, StagingError, UsageError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline import leases
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.report.advice import after_abort
from checkpointd.pipeline.shard import COORDINATOR, AttemptInfo, Progress, Shard

log = logging.getLogger("checkpointd")

ENDED_KEPT = 64
"""Ended saves that are remembered per root and rank, for a client that comes back and for people."""
VOTED_MAX = 64
"""Saves of one client that have voted and wait for other ranks: they hold no snapshot."""
RANKS_KEPT = 1024
"""Ranks whose ended saves are remembered: those that ended one last."""

JobKey = tuple[str, str, str, str, int]
"""Root, nonce of the epoch, tag, attempt, rank: a root that was removed and made again counts its epochs from 1 again."""


@dataclass(slots=True)
class Times:
    """When the save reached each point, in seconds since 1970."""

    began: float = field(default_factory=time.time)
    staged: float | None = None
    persisting: float | None = None
    voted: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class Announcement:
    """A snapshot that is being taken: see `Job.announce`."""

    shard: Shard
    mark: int
    on_whole: Callable[[], object]


class Job:
    """One save of one rank. `on_change(job)` and every listener are called at each change of phase, on the loop."""

    def __init__(
        self,
        root: str,
        nonce: str,
        uid: int,
        state: WriterState,
        info: AttemptInfo,
        *,
        left_s: float,
        on_change: Callable[[Job], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.root, self.nonce, self.uid, self.info = root, nonce, uid, info
        self.times = Times()
        self.slot: SlotMemory | None = None
        self._announced: Announcement | None = None
        self._on_change = on_change
        self._listeners: dict[object, Callable[[Job], None]] = {}
        self._staged: asyncio.Future[Shard] | None = loop.create_future()
        self.progress = Progress()
        self.attempt = Attempt(
            state, info, deadline=loop.time() + left_s, progress=self.progress, on_phase=self._entered, on_free=self._free
        )
        self._lease = leases.of_attempt(state.store, info.prefix) if info.rank == COORDINATOR else None
        self._staged.add_done_callback(self._outlive)
        self.task = loop.create_task(self._run(self._staged))

    @property
    def key(self) -> JobKey:
        return (self.root, self.nonce, self.info.tag, str(self.info.attempt), self.info.rank)

    @property
    def phase(self) -> Phase:
        return self.attempt.phase

    @property
    def shown(self) -> str:
        """The phase in the word that people read."""
        return shown(self.phase, self.attempt.error.code if self.attempt.error else "")

    @property
    def error(self) -> ErrorReport | None:
        error = self.attempt.error
        return None if error is None else ErrorReport(code=error.code, message=str(error), phase=str(self.phase))

    @property
    def advice(self) -> str:
        """What to do about the error; where the attempt was aborted, about what it was aborted for."""
        error, outcome = self.error, self.attempt.outcome
        if error is None:
            return ""
        cause = outcome.error if outcome is not None and outcome.error is not None else error
        return after_abort(cause, self.ranks or (self.info.rank,))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the error names."""
        return tuple(getattr(self.attempt.error, "ranks", ()))

    @property
    def has_voted(self) -> bool:
        """Whether it needs the snapshot no more, and only waits for the other ranks, or has ended."""
        return self.phase is Phase.PREPARED or self.phase in FINAL

    @property
    def has_snapshot(self) -> bool:
        return self._staged is None or self._staged.done()

    def announce(self, slot: SlotMemory, shard: Shard, mark: int, on_whole: Callable[[], object]) -> None:
        """The snapshot will be `shard`; the slot's last 8 bytes are `mark` once it is whole. `on_whole` is called then.

        One that was announced on an earlier connection is forgotten: this one holds the same.
        """
        if self.slot is not slot:
            self._free()
        self.slot, self._announced = slot, Announcement(shard, mark, on_whole)
        slot.use(self)

    def staged(self) -> None:
        """The slot holds the whole snapshot; does nothing where it is known already. UsageError where none was announced."""
        if self._staged is None or self._staged.done():
            return
        if self._announced is None:
            raise UsageError("announce the snapshot before it is staged")
        self.times.staged = time.time()
        self._announced.on_whole()
        self._staged.set_result(self._announced.shard)

    def client_died(self, error: CheckpointdError) -> None:
        """Its client is dead and said no more: the snapshot is whole if its mark says so, else `error` spoils it (J2)."""
        if self.has_snapshot:
            return
        if self._announced is not None and self.slot is not None and self.slot.mark == self._announced.mark:
            log.info("%s: the trainer died when its snapshot was whole (rank %d)", self.info.prefix, self.info.rank)
            self.staged()
        else:
            self.spoiled(error)

    def _outlive(self, staged: asyncio.Future[Shard]) -> None:
        """From here on the save may go on without its trainer: say so at the root (J5)."""
        if self._lease is not None and not staged.cancelled() and staged.exception() is None and self.phase not in FINAL:
            self._lease.keep()

    def spoiled(self, error: CheckpointdError) -> None:
        """There will be no snapshot; does nothing where there is one."""
        if self._staged is not None and not self._staged.done():
            self._staged.set_exception(error)

    async def _run(self, staged: asyncio.Future[Shard]) -> None:
        try:
            await self.attempt.run(staged)
        except Exception as error:  # a defect of ours must not end the daemon, nor leave the client waiting
            log.exception("%s: the writer failed in an unforeseen way; please report it", self.info.prefix)
            self.attempt.error = CheckpointdError(f"the writer failed: {error!r}; please report it")
            self.attempt.phase = Phase.FAILED
            self._entered(Phase.FAILED)
        finally:
            # The slot is not left here: where the attempt was cut off, a thread of it may still read; it calls `_free` itself.
            if not staged.done():
                staged.cancel()
            elif not staged.cancelled():
                staged.exception()  # an attempt that ended early never looked
            self._forget_snapshot()
            if self._lease is not None:
                await self._lease.release()

    def _forget_snapshot(self) -> None:
        """Let go of all that refers to the snapshot (J4); waiting for the garbage collector could take hours."""
        self._staged = self._announced = None
        error: BaseException | None = self.attempt.error
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__

    def _free(self) -> None:
        if self.slot is not None:
            self.slot.leave(self)

    def _entered(self, phase: Phase) -> None:
        now = time.time()
        if phase is Phase.PERSISTING:
            self.times.persisting = now
        elif phase is Phase.PREPARED:
            self.times.voted = now
            self.progress.end()
        elif phase in FINAL:
            self.times.ended = now
            self._say()
            # Nobody will stage it any more, and the attempt waits for it.
            self.spoiled(StagingError("the attempt ended before its snapshot was whole"))
        self._on_change(self)
        for listener in list(self._listeners.values()):
            listener(self)

    def listen(self, who: object, listener: Callable[[Job], None]) -> None:
        """Call `listener` at each change of phase from here on, in place of an earlier one of `who`."""
        self._listeners[who] = listener

    def unlisten(self, who: object) -> None:
        self._listeners.pop(who, None)

    def _say(self) -> None:
        if self.phase is Phase.COMMITTED:
            log.info("%s: committed (rank %d)", self.info.prefix, self.info.rank)
        else:
            log.error("%s: %s (rank %d): %s", self.info.prefix, self.shown, self.info.rank, self.attempt.error)

    def status(self) -> SaveStatus:
        """As people and machines see it."""
        return SaveStatus(
            tag=self.info.tag,
            attempt=str(self.info.attempt),
            step=self.info.step,
            rank=self.info.rank,
            phase=self.shown,
            raw_total=self.progress.raw_total,
            raw_done=self.progress.raw_done,
            stored=self.progress.stored,
            speed_bps=self.progress.speed_bps,
            eta_s=self.progress.eta_s if self.phase is Phase.PERSISTING else None,
            votes_missing=None if self.phase in FINAL else self.attempt.votes_missing,
            error=self.error,
            advice=self.advice,
            stale=self.progress.stale,
            began_at=self.times.began,
            staged_at=self.times.staged,
            persisting_at=self.times.persisting,
            voted_at=self.times.voted,
            ended_at=self.times.ended,
        )


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of a job that has ended."""

    key: JobKey
    info: AttemptInfo
    times: Times
    phase: Phase
    error: ErrorReport | None
    ranks: tuple[int, ...]
    shown: SaveStatus

    @staticmethod
    def of(job: Job) -> Ended:
        return Ended(job.key, job.info, job.times, job.phase, job.error, job.ranks, job.status())

    def status(self) -> SaveStatus:
        return self.shown


@dataclass(slots=True)
class Jobs:
    """All jobs of this daemon: those in flight, and the last ones that ended."""

    _live: dict[JobKey, Job] = field(default_factory=dict)
    _ended: OrderedDict[tuple[str, int], deque[Ended]] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._live)

    def add(self, job: Job) -> None:
        self._live[job.key] = job
        job.task.add_done_callback(lambda _: self._end(job))

    def _end(self, job: Job) -> None:
        del self._live[job.key]
        rank = (job.root, job.info.rank)
        self._ended.setdefault(rank, deque(maxlen=ENDED_KEPT)).append(Ended.of(job))
        self._ended.move_to_end(rank)
        if len(self._ended) > RANKS_KEPT:
            self._ended.popitem(last=False)

    def live(self, key: JobKey) -> Job | None:
        return self._live.get(key)

    def ended(self, key: JobKey) -> Ended | None:
        """What is remembered of the job, if it has ended."""
        return next((job for job in reversed(self._ended.get((key[0], key[-1]), deque())) if job.key == key), None)

    def at(self, root: str) -> list[Job]:
        """The jobs in flight at a root, in the order in which they came."""
        return [job for job in self._live.values() if job.root == root]

    def ended_at(self, root: str) -> list[Ended]:
        """The last jobs that ended at a root, in the order in which they began."""
        ended = [job for (where, _), jobs in self._ended.items() if where == root for job in jobs]
        return sorted(ended, key=lambda job: job.times.began)

    def all(self) -> list[Job]:
        return list(self._live.values())

    def roots(self) -> set[str]:
        return {job.root for job in self._live.values()} | {root for root, _ in self._ended}
