"""A simulated training job on a simulated disk or in a simulated bucket, with faults, and the checks at its end.

A job is a series of incarnations, each with `world_size` ranks in processes of their own. The seed decides the faults: ranks
are killed, or stopped for a while; the power fails; the disk refuses one rank's calls for a while, or requests to the bucket
are lost, late, repeated or refused; a new incarnation starts while ranks of the old one still run; sidecars, if the job has
them, are lost, and the ranks vote no on the saves in their hands. After the faults, one more incarnation must load and commit.
`simledger.py` has the invariants; a run that breaks one raises an error with schedule and trace as notes.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextvars import Context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from checkpointd.commit.branches import commits_of
from checkpointd.commit.machine import Phase
from checkpointd.config import CommitConfig
from checkpointd.errors import CheckpointdError, RootInUseError
from checkpointd.layout.keys import AttemptId, holder_of
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.root.leases import Sight
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.writers import Life
from checkpointd.testing import simloop
from checkpointd.testing.job.simcollector import collect_now_and_then
from checkpointd.testing.job.simledger import InvariantError, Ledger
from checkpointd.testing.job.simrank import JobConfig, Rank, SimBoard, read_contents
from checkpointd.testing.job.simreader import read_now_and_then
from checkpointd.testing.job.simroot import BucketRoot, DiskRoot, SimRoot
from checkpointd.testing.job.simschedule import (
    NAMES,
    BucketConfig,
    Fail,
    Fault,
    Kill,
    LoseSidecar,
    Moment,
    Outage,
    Pause,
    PowerCut,
    Refuse,
    Schedule,
    SecondJob,
)
from checkpointd.testing.job.simsidecar import SimRunner, SimSidecar, look_after
from checkpointd.testing.simbucket import Fate, Request, SimBucket, Trouble
from checkpointd.testing.simdisk import SimDisk
from checkpointd.testing.simstorage import Effect, SimStorage

INCARNATIONS_MAX = 30
ZOMBIES_END_S = 500.0
LAST_RETRY_S = 60.0
"""How long the client repeats requests in the last incarnation, so that mere weather fails none of its saves."""


@dataclass(slots=True)
class SimReport:
    """Counts of a run: effects up to the end of the faults, faults, attempts committed and aborted, incarnations."""

    effects: int = 0
    struck: int = 0
    committed: int = 0
    aborted: int = 0
    incarnations: int = 0
    sidecars: int = 0
    """Sidecars that were started."""
    surviving: int = 0
    """Attempts that survived into a newer start, and that their own coordinator then committed."""
    cared_for: int = 0
    """Attempts that a newly started sidecar decided, although it has no save job for them."""
    collected: int = 0
    """Attempts of which a collector beside the job removed objects."""
    refused: int = 0
    """Starts that found another job alive."""
    read: int = 0
    """Checkpoints that readers beside the job read completely."""
    entries_max: int = 0
    """The most entries that the log had at once."""
    read_back: int = 0
    """Checkpoints that were recorded as read back whole at the end."""


@dataclass(slots=True)
class Incarnation:
    """The ranks that one launcher started."""

    number: int
    ranks: list[Rank]
    tasks: list[asyncio.Task[None]]
    interrupted: asyncio.Future[str]
    """The launcher's next action: `kill` or `leave` its other ranks. After a power cut the launcher is `gone`."""
    followed_by: SecondJob = field(default_factory=SecondJob)
    """The job that starts next, if the ranks of this incarnation were left running."""

    def interrupt(self, how: str) -> None:
        if not self.interrupted.done():
            self.interrupted.set_result(how)


@dataclass(slots=True)
class SimJob:
    """One run of a schedule. Made inside the run."""

    schedule: Schedule
    root: SimRoot = field(init=False)
    report: SimReport = field(default_factory=SimReport)
    ledger: Ledger = field(init=False)
    _faults: dict[int | Moment, Fault] = field(init=False)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _refusals: dict[str, Refuse | Fail] = field(default_factory=dict)
    _newest: Incarnation | None = None
    _sidecars: dict[int, SimSidecar] = field(default_factory=dict)
    _restarted: list[SimSidecar] = field(default_factory=list)
    _rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        job = self.schedule.job
        retires = job.keeps is not None or job.supersedes
        self.root = self._bucket_root(self.schedule.bucket) if self.schedule.bucket is not None else self._disk_root()
        self.ledger = Ledger(self.root, hindered=self.schedule.sweeps_foreign, retires=retires)
        self._faults = dict(self.schedule.faults)
        self._rng = random.Random(f"job {self.schedule.seed}")
        self.storage.after = self._after

    def _disk_root(self) -> DiskRoot:
        disk = SimDisk(root="/root")
        disk.before = self._refusal
        return DiskRoot(disk, self._is_alive, self.schedule.view)

    def _bucket_root(self, config: BucketConfig) -> BucketRoot:
        bucket = SimBucket(numbered=config.numbered, page=config.page, weather=dict(config.weather), retry_s=config.retry_s)
        bucket.before = self._fate
        bucket.hindered = lambda process: self.ledger.refused.add(process)
        return BucketRoot(bucket, config.client)

    @property
    def storage(self) -> SimStorage:
        return self.root.storage

    async def run(self) -> SimReport:
        """Run incarnations until one ends by itself, then check the store."""
        await self._until_done()
        await self._end_zombies()
        self.report.effects = self.storage.effects
        self._faults.clear()
        self._refusals.clear()
        if isinstance(self.storage, SimBucket):
            self.storage.troubles.clear()
        if self.schedule.cut_at_end:
            self._cut_power()
        await self._last_incarnation()
        await self._check_all()
        self._raise_if_broken()
        self.report.surviving = self.ledger.surviving_commits
        self.report.collected = self.ledger.collected
        self.report.read = self.ledger.read
        self.report.entries_max = self.ledger.log.entries_max
        self.report.cared_for = sum(sidecar.decided for sidecar in self._restarted)
        return self.report

    # --- incarnations ------------------------------------------------------------------------------------------

    async def _until_done(self) -> None:
        follower, name = SecondJob(), self.schedule.job.name
        for _ in range(INCARNATIONS_MAX):
            name = name if follower.who == "same" else "stranger"  # a stranger's launcher starts the stranger again
            config = replace(self.schedule.job, name=name)
            incarnation = self._start(config, take_over=follower.who == "usurper")
            await self._ended(incarnation)
            if not incarnation.interrupted.done():
                return
            follower = incarnation.followed_by
            await asyncio.sleep(self._rng.random() * 3)
            if incarnation.interrupted.result() == "kill":
                self._kill_all(incarnation)
        raise simloop.StuckError(f"no incarnation of {INCARNATIONS_MAX} came to its end")

    async def _ended(self, incarnation: Incarnation) -> None:
        """Wait until all its ranks have ended, or it was interrupted."""
        first: list[asyncio.Future[Any]] = [asyncio.gather(*incarnation.tasks), incarnation.interrupted]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        self._raise_if_broken()

    def _start(self, config: JobConfig, *, take_over: bool = False) -> Incarnation:
        self.report.incarnations += 1
        number, board = self.report.incarnations, SimBoard(self.storage.loop)
        ranks, tasks = [], []
        for rank in range(config.world_size):
            name = f"{rank}.{number}"
            process, store = self.root.store(name)
            made = Rank(
                config=config,
                incarnation=number,
                rank=rank,
                name=name,
                store=store,
                board=board,
                ledger=self.ledger,
                rng=random.Random(f"rank {config.seed} {name}"),
                process=process,
                sight=self._sight(name, config),
                take_over=take_over,
                sidecar=partial(self._sidecar, config, rank) if config.sidecars else None,
            )
            ranks.append(made)
            tasks.append(process.spawn(self._watched(made), name=name))
        for collector in range(config.collectors):
            self._collect(config, f"gc{collector}.{number}")
        for reader in range(config.readers):
            self._read(config, f"reader{reader}.{number}")
        self._newest = Incarnation(number, ranks, tasks, self.storage.loop.create_future())
        return self._newest

    def _collect(self, config: JobConfig, name: str) -> None:
        """Begin a collector beside the job."""
        process, store = self.root.store(name, far=config.supersedes)
        rng = random.Random(f"collect {config.seed} {name}")
        work = collect_now_and_then(store, config.retention, rng, self.ledger, deletes=config.supersedes)
        process.spawn(work, name=name)

    def _read(self, config: JobConfig, name: str) -> None:
        """Begin a reader beside the job."""
        process, store = self.root.store(name, read_only=True)
        rng = random.Random(f"read {config.seed} {name}")
        process.spawn(read_now_and_then(store, name, rng, self.ledger), name=name)

    def _sidecar(self, config: JobConfig, rank: int) -> SimSidecar:
        """The sidecar of `rank`'s node; a new one if the last one is lost."""
        found = self._sidecars.get(rank)
        if found is None or found.lost.done():
            self.report.sidecars += 1
            name = f"sidecar{rank}.{self.report.sidecars}"
            process, store = self.root.store(name)
            sight = self._sight(name, config)
            state = WriterState(store=store, persist=config.persist, commit=config.committing, sight=sight)
            lost: asyncio.Future[None] = self.storage.loop.create_future()
            found = SimSidecar(process, SimRunner(name, state, self.ledger), lost, sight)
            process.on_death(found.lose)
            if rank in self._sidecars:
                care = random.Random(f"care {config.seed} {name}")
                process.spawn(look_after(found, care), name="care")
                self._restarted.append(found)
            self._sidecars[rank] = found
        return found

    async def _watched(self, rank: Rank) -> None:
        """A rank whose start fails ends its incarnation, as an exception in a training script does."""
        incarnation = self._newest
        assert incarnation is not None
        try:
            await rank.train()
        except CheckpointdError as error:
            # The message names a process, and its id differs when the run is replayed.
            self.storage.note(f"{rank.name} ends: {error.code if isinstance(error, RootInUseError) else error}")
            self.report.refused += isinstance(error, RootInUseError) and rank.rank == 0
            incarnation.interrupt("kill")
            if incarnation is not self._newest:  # nobody waits for its end any more
                self._kill_all(incarnation)
        except Exception as error:
            self.ledger.report(_innermost(error))
            incarnation.interrupt("kill")

    def _is_alive(self, writer: str) -> bool:
        return not self.schedule.sweeps_foreign and writer in self.storage.alive()

    def _sight(self, name: str, config: JobConfig) -> Sight:
        return Sight(process=name, life=self._life, length_s=config.lease_s)

    def _life(self, process: str) -> Life:
        if not self.schedule.sees_deaths:
            return "unknown"
        return "running" if process in self.storage.alive() else "ended"

    def _kill_all(self, incarnation: Incarnation) -> None:
        for rank in incarnation.ranks:
            if rank.name in self.storage.alive():
                self.storage.kill(rank.name)

    def _raise_if_broken(self) -> None:
        if self.ledger.broken is not None:
            raise self.ledger.broken

    async def _end_zombies(self) -> None:
        """Let every running process continue to its end."""
        for name in self.storage.alive():
            self.storage.resume(name)
        await asyncio.sleep(ZOMBIES_END_S)
        self._raise_if_broken()
        if not self.schedule.sweeps_foreign:  # a put fails if its temporary file is removed
            self.ledger.at_rest()
        for name in self.storage.alive():
            self.storage.kill(name)

    async def _last_incarnation(self) -> None:
        config = replace(
            self.schedule.job,
            deviations=False,
            steps=1,
            commit=CommitConfig(timeout_s=600.0, poll_max_s=0.5),
        )
        if isinstance(self.storage, SimBucket):
            self.storage.retry_s = LAST_RETRY_S
        last = self._start(config)
        await self._ended(last)
        for rank in last.ranks:
            if list(rank.done.values()) != [Phase.COMMITTED]:
                raise InvariantError("next-save-works", f"rank {rank.name} ended its last save with {rank.done}")
        self._kill_all(last)

    # --- the end -----------------------------------------------------------------------------------------------

    async def _check_all(self) -> None:
        self._cut_power()
        process, store = self.root.store("checker")
        await process.spawn(self._check(store))

    async def _check(self, store: Store) -> None:
        """Everything that was ever reported is still there, and every checkpoint loads whole."""
        root_log = RootLog.of(store)
        state = await root_log.look()
        if root_log.fault or state != self.ledger.log.state:
            raise InvariantError("durable", f"the log is read as {state.number}: {root_log.fault or 'another state'}")
        self.ledger.check_kept()
        self._check_uploads(state.start)
        checkpoints = commits_of(state.attempts.values())
        for checkpoint in checkpoints:
            await self._check_whole(store, checkpoint)
            if checkpoint.read_back == "damaged":
                raise InvariantError("nothing-lost", f"{checkpoint.prefix} is whole, and is recorded as damaged")
        if fault := self.ledger.latest_fault():
            raise InvariantError("latest-follows", fault)
        self.report.read_back = sum(checkpoint.read_back == "whole" for checkpoint in checkpoints)
        self.report.committed = len(checkpoints)
        self.report.aborted = self.ledger.log.count("aborted")
        if self.report.aborted and self.schedule.is_calm:
            raise InvariantError("always-commits", f"{self.report.aborted} saves were aborted, and there was no fault")

    def _check_uploads(self, newest_start: int) -> None:
        for key in self.root.unfinished():
            attempt = AttemptId.parse(holder_of(key).rpartition("/")[2])
            if attempt is None or attempt.start < newest_start:
                raise InvariantError("uploads-stand", f"the upload of {key} is unfinished after a start")

    async def _check_whole(self, store: Store, checkpoint: LoggedAttempt) -> None:
        for rank in range(self.schedule.job.world_size):
            try:
                contents = await read_contents(store, checkpoint, rank)
            except CheckpointdError as error:
                raise InvariantError("nothing-lost", f"{checkpoint.prefix} is committed, but {error}") from error
            self.ledger.whole(checkpoint.prefix, rank, contents)

    # --- faults ------------------------------------------------------------------------------------------------

    def _after(self, effect: Effect, done: bool) -> None:
        try:
            if done:
                self.ledger.watch(effect)
        except InvariantError as error:
            self.ledger.report(error)
        if not self._faults:
            return
        moments: list[int | Moment] = [effect.number, *self._moments(effect)]
        for when in moments:
            fault = self._faults.pop(when, None)
            if fault is not None and self._newest is not None:
                self.report.struck += 1
                self._strike(fault, self._newest, effect.process)

    def _moments(self, effect: Effect) -> list[Moment]:
        """The moments at which `effect` is the last one; of an entry of the log, one for each kind of record in it, too."""
        other, path = "ballot" if "/ballot-" in effect.path else "", f"/{effect.path}"
        names = [next((name for name in NAMES if path.endswith(name)), other) if path.endswith(NAMES) else other]
        names += sorted({str(record.__struct_config__.tag) for record in self.ledger.log.put})
        for name in names:
            self._counts[effect.kind, name] += 1
        return [Moment(effect.kind, name, self._counts[effect.kind, name]) for name in names]

    def _strike(self, fault: Fault, incarnation: Incarnation, actor: str) -> None:
        alive = self.storage.alive()
        names = [*(rank.name for rank in incarnation.ranks), actor]
        match fault:
            case PowerCut():
                self._cut_power()
                incarnation.interrupt("gone")
            case SecondJob():
                incarnation.followed_by = fault
                incarnation.interrupt("leave")
            case Kill(rank, zombies) if (name := names[rank]) in alive:
                self.storage.kill(name)
                incarnation.interrupt("leave" if zombies else "kill")
            case Pause(rank, seconds, replaced) if (name := names[rank]) in alive:
                self._pause(name, seconds)
                if replaced:
                    incarnation.interrupt("leave")
            case LoseSidecar(rank, how, seconds) if (sidecar := self._sidecars.get(rank)) and sidecar.name in alive:
                if how == "killed":
                    self.storage.kill(sidecar.name)
                elif how == "stopped":
                    self._pause(sidecar.name, seconds)
                sidecar.lose()
            case Refuse(rank):
                self._refusals[names[rank]] = fault
            case Fail(rank):
                self._refusals[names[rank]] = fault
                if (sidecar := self._sidecars.get(rank)) is not None:
                    self._refusals[sidecar.name] = fault
            case Outage(seconds, fate, share) if isinstance(self.storage, SimBucket):
                self.storage.note(f"for {seconds:.3f} s, {share:.0%} of the requests: {fate}")
                self.storage.troubles.append(Trouble(self.storage.loop.time() + seconds, fate, share))

    def _pause(self, name: str, seconds: float) -> None:
        self.ledger.hindered = True
        self.storage.pause(name)
        # The timer belongs to no process: the current process triggered the fault, and may be the paused one.
        self.storage.loop.call_later(seconds, self._resume, name, context=Context())

    def _resume(self, name: str) -> None:
        if name in self.storage.alive():
            self.storage.resume(name)

    def _cut_power(self) -> None:
        self.storage.power_cut()
        try:
            self.ledger.log.after_power_cut()
        except InvariantError as error:
            self.ledger.report(error)

    def _refusal(self, effect: Effect) -> int | None:
        fault = self._next_fault(effect.process, effect.kind, effect.path)
        if not isinstance(fault, Refuse):
            return None
        self.ledger.refused.add(effect.process)
        return fault.number

    def _fate(self, request: Request) -> Fate | None:
        fault = self._next_fault(request.process, request.kind, f"/{request.key}")
        return fault.fate if isinstance(fault, Fail) else None

    def _next_fault(self, process: str, kind: str, path: str) -> Refuse | Fail | None:
        """The fault that the next call of `process` meets; there is one less of it now."""
        fault = self._refusals.get(process)
        if fault is None or (fault.kind and fault.kind != kind):
            return None
        if isinstance(fault, Fail) and not path.endswith(fault.name):
            return None
        if fault.count <= 1:
            del self._refusals[process]
        else:
            self._refusals[process] = replace(fault, count=fault.count - 1)
        return fault


def _innermost(error: Exception) -> Exception:
    return _innermost(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def run_schedule(schedule: Schedule) -> SimReport:
    """Run `schedule`; an error carries the schedule and the end of the trace."""
    jobs: list[SimJob] = []

    async def main() -> SimReport:
        jobs.append(SimJob(schedule))
        return await jobs[0].run()

    try:
        return simloop.run(schedule.seed, main())
    except BaseException as error:
        error.add_note(f"replay: run_schedule({schedule!r})")
        if jobs:
            error.add_note(jobs[0].storage.story())
        raise
