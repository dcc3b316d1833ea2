"""The save jobs of the daemon. Each runs the same `Attempt` as the in-process writer, and outlives its client.

Invariants
  SAVEJOB-1  There is one job per (root, start's nonce, user, tag, attempt, rank), and nobody begins it twice. A client that
      comes back is attached to it if the shard is in the spool.
  SAVEJOB-2  A snapshot is persisted only if it is whole, by its client's message or by the mark in its slot. If the connection
      ends before that, the job votes no, as does the client if it lives.
  SAVEJOB-3  A slot stays mapped until the job has left it, even if the client has gone.
  SAVEJOB-4  A job that has ended refers to no snapshot memory. Only plain data about it is kept.
  SAVEJOB-6  A job whose shard is in the spool holds no snapshot. If the daemon ends, the next one on this node takes it up.
  SAVEJOB-5  From the moment when the coordinator begins to write a whole snapshot at the root until the attempt is decided, the
      daemon renews a lease of it. So a start that cannot ask this daemon leaves the attempt to it. What only waits in the spool
      has none: hundreds may wait, each renewal is a request, and at the root there is nothing to leave alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from checkpointd.commit.machine import FINAL, SUPERSEDED, Phase, shown
from checkpointd.config import ServeConfig
from checkpointd.daemon.accounts import Charge
from checkpointd.daemon.memory.mapped import SlotMemory
from checkpointd.daemon.process.logs import Subject, about, told
from checkpointd.daemon.protocol.wire import RANKS_TOLD
from checkpointd.daemon.spool.own import OwnSpool
from checkpointd.daemon.spool.shards import SpooledShard
from checkpointd.daemon.spool.spooled_attempt import SpooledAttempt
from checkpointd.daemon.status.model import SaveStatus
from checkpointd.errors import CheckpointdError, SidecarFullError, StagingError, UsageError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.phrases import byte_size, lasting
from checkpointd.pipeline import identity
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress
from checkpointd.report.advice import after_abort

log = logging.getLogger("checkpointd")

ENDED_KEPT = 64
"""Ended saves that are kept per root and rank, for the status and for clients that come back."""
VOTED_MAX = 64
"""Saves of one client that may wait for other ranks after their vote; they hold no snapshot."""
SPOOLED_MAX = 1024
"""Saves of one client that may lie in the spool."""
RANKS_KEPT = 1024
"""Ranks whose ended saves are kept: those whose last save ended most recently."""
ALL_KEPT = 8192
"""Ended saves that are kept for all ranks together."""

JobKey = tuple[str, str, int, str, str, int]
"""Root, nonce of the start, uid, tag, attempt, rank. The nonce tells starts apart when a root is removed and made again; the
uid keeps the saves of users apart.
"""


def job_key(root: str, nonce: str, uid: int, info: AttemptInfo) -> JobKey:
    return (root, nonce, uid, info.tag, str(info.attempt), info.rank)


@dataclass(slots=True)
class Times:
    """When the save reached each point, in seconds since 1970."""

    began: float = field(default_factory=time.time)
    staged: float | None = None
    persisting: float | None = None
    spooled: float | None = None
    uploading: float | None = None
    voted: float | None = None
    ended: float | None = None


@dataclass(frozen=True, slots=True)
class SnapshotInStaging:
    """A snapshot in staging; see `SaveJob.announce`."""

    shard: Shard
    mark: int
    charge: Charge
    on_whole: Callable[[], object]


class _Snapshot:
    """The attempt awaits this instead of the future, so that no frame refers to the snapshot longer than the job does."""

    def __init__(self, staged: asyncio.Future[Shard]) -> None:
        self._staged: asyncio.Future[Shard] | None = staged

    def __await__(self) -> Generator[Any, None, Shard]:
        assert self._staged is not None, "nobody reads the snapshot any more"
        return self._staged.__await__()

    def forget(self) -> None:
        self._staged = None


class SaveJob:
    """One save of one rank. Calls `on_change(job)` and every listener at each change of phase, on the loop."""

    def __init__(
        self,
        root: str,
        nonce: str,
        uid: int,
        state: WriterState,
        info: AttemptInfo,
        *,
        left_s: float,
        on_change: Callable[[SaveJob], None],
        spool: OwnSpool | None = None,
        spooled: SpooledShard | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.root, self.nonce, self.uid, self.info = root, nonce, uid, info
        self.times = Times()
        self.slot: SlotMemory | None = None
        self._announced: SnapshotInStaging | None = None
        self._on_change = on_change
        self._listeners: dict[object, Callable[[SaveJob], None]] = {}
        self._staged: asyncio.Future[Shard] | None = loop.create_future()
        """None once nobody reads the snapshot."""
        self.safe = asyncio.Event()
        """Set when the shard is in the spool, or when the job has ended."""
        self.progress = ShardProgress()
        deadline, progress, entered, free = loop.time() + left_s, self.progress, self._entered, self._free
        if spool is None:
            self.attempt = Attempt(
                state, info, deadline=deadline, progress=progress, on_phase=entered, on_free=free, outlives=True
            )
        else:
            self.attempt = SpooledAttempt(
                state, info, spool, deadline=deadline, progress=progress, on_phase=entered, on_free=free, shard=spooled
            )
        self._snapshot = _Snapshot(self._staged)
        if spooled is not None:
            self._take_up(spooled)
        self.task = loop.create_task(self._run())

    def _take_up(self, shard: SpooledShard) -> None:
        """An earlier daemon has left the shard in the spool."""
        vote = shard.record.vote
        self._forget_snapshot()
        self.progress.begin(vote.raw_bytes)
        self.progress.add(vote.raw_bytes, vote.stored_bytes)
        self.progress.end()
        self.progress.told, self.progress.held_s = vote.seconds, vote.held_s
        self.times.began = self.times.spooled = shard.record.spooled_at
        self.safe.set()

    @property
    def key(self) -> JobKey:
        return job_key(self.root, self.nonce, self.uid, self.info)

    @property
    def phase(self) -> Phase:
        return self.attempt.phase

    @property
    def shown(self) -> str:
        """The phase as the status shows it."""
        return shown(self.phase, self.attempt.error.code if self.attempt.error else "")

    @property
    def error(self) -> ErrorReport | None:
        error = self.attempt.error
        return None if error is None else ErrorReport.of(error, str(self.phase), told(str(error)))

    @property
    def advice(self) -> str:
        """What to do about the error, or about the error that made another rank abort the attempt."""
        error, outcome = self.error, self.attempt.outcome
        if error is None:
            return ""
        cause = outcome.abort.error if outcome is not None and outcome.abort is not None else error
        return after_abort(cause, self.ranks or (self.info.rank,))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that the error names, at most RANKS_TOLD."""
        return (self.attempt.error.ranks if self.attempt.error else ())[:RANKS_TOLD]

    @property
    def has_voted(self) -> bool:
        """Whether the job needs the snapshot no longer: it is in the spool, waits for the other ranks, or has ended."""
        return self.phase is Phase.PREPARED or self.phase in FINAL or self.is_in_spool

    @property
    def is_in_spool(self) -> bool:
        """Whether the next daemon on this node could go on with the job."""
        return isinstance(self.attempt, SpooledAttempt) and self.attempt.is_in_spool

    @property
    def has_snapshot(self) -> bool:
        return self._staged is None or self._staged.done()

    def announce(self, slot: SlotMemory, shard: Shard, mark: int, charge: Charge, on_whole: Callable[[], object]) -> None:
        """The snapshot will be `shard`. Once it is whole, the slot's last 8 bytes are `mark`, and `on_whole` is called.

        Takes over the `charge`. UsageError if a snapshot was announced before.
        """
        if self._announced is not None or self.has_snapshot:
            charge.release()
            raise UsageError(f"the snapshot of {self.info.prefix} was announced before")
        self.slot, self._announced = slot, SnapshotInStaging(shard, mark, charge, on_whole)
        slot.use(self)

    def held(self, seconds: float) -> float:
        """Note that the save held training for `seconds`. Returns the new part, since a client may say it twice."""
        before, self.progress.held_s = self.progress.held_s, seconds
        return max(0.0, seconds - before)

    def staged(self) -> None:
        """The slot holds the whole snapshot. Does nothing if that is known already.

        UsageError if no snapshot was announced, or if parts of the slot were never written.
        """
        if self._staged is None or self._staged.done():
            return
        if self._announced is None or self.slot is None:
            raise UsageError("announce the snapshot before it is staged")
        self.slot.check_whole(len(self._announced.shard.buffer))
        self.times.staged = time.time()
        self._announced.on_whole()
        self._staged.set_result(self._announced.shard)

    def client_left(self, pid: int) -> None:
        """The connection of process `pid` is over. If it has not said that the snapshot is whole, and the mark does not say so,
        there will be none.
        """
        if self.has_snapshot:
            return
        if self._announced is not None and self.slot is not None and self.slot.mark == self._announced.mark:
            log.info("%s: the trainer died when its snapshot was whole", self.info.prefix)
            try:
                self.staged()
            except UsageError as unwritten:
                self.spoiled(unwritten)
        else:
            who = f"rank {self.info.rank} (process {pid})"
            self.spoiled(StagingError(f"{who} ended, or lost its connection, while its snapshot was being taken"))

    def spoiled(self, error: CheckpointdError) -> None:
        """There will be no snapshot. Does nothing if it is whole already."""
        if self._staged is not None and not self._staged.done():
            self._staged.set_exception(error)

    async def _run(self) -> None:
        about(Subject(self.root, self.info.rank, self.info.tag, str(self.info.attempt)))
        identity.acts_for(self.uid)
        try:
            await self.attempt.run(self._snapshot)
        except Exception as error:  # a defect must neither end the daemon nor leave the client waiting
            log.exception("%s: the writer failed in an unforeseen way; please report it", self.info.prefix)
            self.attempt.error = CheckpointdError(f"the writer failed: {error!r}; please report it")
            self.attempt.phase = Phase.FAILED
            self._entered(Phase.FAILED)
        finally:
            # Do not leave the slot here: a thread of a cancelled attempt may still read. The attempt calls `_free` itself.
            self._forget_snapshot()
            self.safe.set()

    def _forget_snapshot(self) -> None:
        """Drop every reference to the snapshot (SAVEJOB-4); the garbage collector might need hours."""
        staged, self._staged = self._staged, None
        self._snapshot.forget()
        if staged is not None and not staged.done():
            staged.cancel()
        elif staged is not None and not staged.cancelled():
            staged.exception()  # mark it as retrieved: an attempt that ended early did not await it
        if self._announced is not None:
            self._announced.charge.release()
            self._announced = None
        for error in _chain(self.attempt.error, self.attempt.own_error):
            # Drop only the traceback: clearing its frames would end generators that still run (ATTEMPT-6).
            error.__traceback__ = None

    def _free(self) -> None:
        """The attempt reads the snapshot no longer, although it may end much later."""
        if self.slot is not None:
            self.slot.leave(self)
            self.slot = None
        # Later, because the caller's frames still refer to the snapshot.
        asyncio.get_running_loop().call_soon(self._forget_snapshot)

    def _entered(self, phase: Phase) -> None:
        now = time.time()
        if phase is Phase.PERSISTING:
            self.times.persisting = now
        elif phase is Phase.SPOOLED:
            self.times.spooled = now
            self.progress.end()
            self.safe.set()
        elif phase is Phase.UPLOADING:
            self.times.uploading = now
        elif phase is Phase.PREPARED:
            self.times.voted = now
            self.progress.end()
        elif phase in FINAL:
            self.times.ended = now
            self._say()
            # The attempt waits for a snapshot that nobody will stage.
            self.spoiled(StagingError("the attempt ended before its snapshot was whole"))
        self._on_change(self)
        for listener in list(self._listeners.values()):
            listener(self)

    def listen(self, who: object, listener: Callable[[SaveJob], None]) -> None:
        """Call `listener` at each change of phase from here on; replaces the earlier listener of `who`."""
        self._listeners[who] = listener

    def unlisten(self, who: object) -> None:
        self._listeners.pop(who, None)

    def _say(self) -> None:
        info, progress, took_s = self.info, self.progress, (self.times.ended or 0.0) - self.times.began
        seconds, extra = _known(progress.seconds), {"fields": ended_fields(self.status())}
        if self.phase is Phase.COMMITTED:
            log.info(
                "%s: committed: %s, stored as %s, in %s (%s)",
                info.prefix,
                byte_size(progress.raw_done),
                byte_size(progress.stored),
                lasting(took_s),
                ", ".join(f"{name} {lasting(value)}" for name, value in seconds.items()),
                extra=extra,
            )
            return
        log.log(
            logging.WARNING if self.shown == SUPERSEDED else logging.ERROR,
            "%s: %s after %s, %s of %s written: %s",
            info.prefix,
            self.shown,
            lasting(took_s),
            byte_size(min(progress.raw_done, progress.raw_total)),
            byte_size(progress.raw_total),
            self.attempt.error,
            extra=extra,
        )

    def status(self) -> SaveStatus:
        """The save as the status shows it."""
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
            no_progress=self.progress.no_progress,
            seconds=self.progress.seconds,
            pace=self.progress.pace.share,
            rested_s=self.progress.pace.rested_s,
            began_at=self.times.began,
            staged_at=self.times.staged,
            persisting_at=self.times.persisting,
            spooled_at=self.times.spooled,
            uploading_at=self.times.uploading,
            uploaded=self.progress.uploaded,
            upload_total=self.progress.upload_total,
            voted_at=self.times.voted,
            ended_at=self.times.ended,
        )


def _chain(*errors: BaseException | None) -> Iterator[BaseException]:
    """`errors`, each with its causes."""
    for error in errors:
        while error is not None:
            yield error
            error = error.__cause__ or error.__context__


def _known(seconds: PhaseSeconds) -> dict[str, float]:
    return {name: value for name, value in msgspec.structs.asdict(seconds).items() if value is not None}


def ended_fields(save: SaveStatus) -> dict[str, object]:
    """The JSON fields of the log record about a save that has ended."""
    return {
        "event": save.phase,
        "bytes": save.raw_done,
        "stored_bytes": save.stored,
        "seconds": round((save.ended_at or save.began_at) - save.began_at, 3),
        "phase_seconds": _known(save.seconds),
        **({} if save.inline is None else {"inline": save.inline.reason, "why": save.inline.why}),
    }


def ended_inline(save: SaveStatus) -> str:
    """The log message about an inline save that has ended."""
    took_s = (save.ended_at or save.began_at) - save.began_at
    why = save.inline.why if save.inline is not None else ""
    error = "" if save.error is None else f": {save.error.message}"
    return (
        f"{save.tag}/{save.attempt}: {save.phase} inline, by its trainer (rank {save.rank}): {byte_size(save.raw_done)}, "
        f"stored as {byte_size(save.stored)}, in {lasting(took_s)} ({why}){error}"
    )


@dataclass(frozen=True, slots=True)
class EndedSaveJob:
    """The data that is kept about a save that has ended."""

    key: JobKey
    save: SaveStatus
    phase: Phase | None = None
    """The phase in which the job ended; None for an inline save, which its trainer only reported here."""
    ranks: tuple[int, ...] = ()
    """The ranks that the error names."""


@dataclass(slots=True)
class SaveJobs:
    """All jobs of this daemon: the saves in flight, and the last saves that ended."""

    _live: dict[JobKey, SaveJob] = field(default_factory=dict)
    _ended: OrderedDict[tuple[str, int, int], deque[EndedSaveJob]] = field(default_factory=OrderedDict)
    """By root, uid and rank."""

    def __len__(self) -> int:
        return len(self._live)

    def check_room(self, root: str, rank: int, uid: int, config: ServeConfig) -> None:
        """SidecarFullError if the rank, its user or all users together have too many saves in flight.

        Saves of earlier connections count, so a client gets no more by connecting again.
        """
        of_user = [job for job in self._live.values() if job.uid == uid and not job.is_in_spool]
        voted = [job.has_voted for job in of_user if (job.root, job.info.rank) == (root, rank)]
        too_many = voted.count(False) >= 2 * config.saves_max or len(voted) >= 2 * VOTED_MAX
        in_spool = sum(job.is_in_spool for job in self._live.values())
        too_many = too_many or in_spool >= config.clients_max * SPOOLED_MAX
        live = len(self) - in_spool
        if too_many or len(of_user) >= config.user_clients * VOTED_MAX or live >= config.clients_max * VOTED_MAX:
            raise SidecarFullError(
                f"{len(voted)} saves of rank {rank} are in flight, {len(of_user)} of user {uid} and {len(self)} in all: "
                "no more are taken before one of them ends"
            )

    def add(self, job: SaveJob) -> None:
        self._live[job.key] = job
        job.task.add_done_callback(lambda _: self._end(job))

    def _end(self, job: SaveJob) -> None:
        del self._live[job.key]
        self.remember(EndedSaveJob(job.key, job.status(), job.phase, job.ranks))

    def remember(self, ended: EndedSaveJob) -> None:
        """Keep the data of a save that has ended."""
        rank = _rank_of(ended.key)
        self._ended.setdefault(rank, deque(maxlen=ENDED_KEPT)).append(ended)
        self._ended.move_to_end(rank)
        while len(self._ended) > RANKS_KEPT or (len(self._ended) > 1 and self._count() > ALL_KEPT):
            self._ended.popitem(last=False)

    def forget(self, root: str) -> None:
        """Forget all ended saves at `root`."""
        for key in [key for key in self._ended if key[0] == root]:
            del self._ended[key]

    def _count(self) -> int:
        return sum(map(len, self._ended.values()))

    def live(self, key: JobKey) -> SaveJob | None:
        return self._live.get(key)

    def ended(self, key: JobKey) -> EndedSaveJob | None:
        """The save, if it has ended and is still remembered; a job of this daemon rather than a reported inline save."""
        found = [ended for ended in reversed(self._ended.get(_rank_of(key), ())) if ended.key == key]
        return next((ended for ended in found if ended.phase is not None), found[0] if found else None)

    def at(self, root: str) -> list[SaveJob]:
        """The jobs in flight at a root, in the order in which they came."""
        return [job for job in self._live.values() if job.root == root]

    def ended_at(self, root: str) -> list[EndedSaveJob]:
        """The last saves that ended at a root, in the order in which they began."""
        ended = [job for (where, *_), jobs in self._ended.items() if where == root for job in jobs]
        return sorted(ended, key=lambda job: job.save.began_at)

    def all(self) -> list[SaveJob]:
        return list(self._live.values())

    def roots(self) -> set[str]:
        return {job.root for job in self._live.values()} | {root for root, *_ in self._ended}


def _rank_of(key: JobKey) -> tuple[str, int, int]:
    root, _, uid, _, _, rank = key
    return (root, uid, rank)
