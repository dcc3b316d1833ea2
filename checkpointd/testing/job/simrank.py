"""One rank of a simulated training job: it starts, loads, computes, and saves in the background, like the client without torch.

The steps have the order of `checkpointd_client`: rank 0 takes the start, recovers and tells the other ranks; all ranks load the
newest checkpoint; each save is an `Attempt`, with at most two in flight. If the job has sidecars, another process runs the
attempt, and after the loss of that process the rank votes no.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, LoadConfig, PersistConfig
from checkpointd.errors import CheckpointdError, SidecarError, SkippedError, StagingError
from checkpointd.layout.boxes import whole
from checkpointd.layout.keys import AttemptId, default_tag
from checkpointd.layout.log_records import BeginRecord, LoggedAttempt
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.outcome.starting import begin
from checkpointd.pipeline.pages import page_buffer, page_up
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.load import read_tensors
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.candidates import candidates
from checkpointd.pipeline.root.leases import Beginner, HeldLease, Sight
from checkpointd.pipeline.shard import AttemptInfo, Bytes, Shard, ShardTensor, aligned
from checkpointd.store.base import Store
from checkpointd.testing.job.simledger import Contents, InvariantError, Ledger
from checkpointd.testing.job.simsidecar import SimRunner, SimSidecar, snapshot_of
from checkpointd.testing.simloop import Process

IN_FLIGHT_MAX = 2
COMPUTE_S_MAX = 2.0
REUSED_TAG = "best"


class SimBoard:
    """Stands for torch.distributed's Store: one rank posts a value once, and other ranks wait for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._values: dict[str, object] = {}
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def post(self, key: str, value: object) -> None:
        self._values[key] = value
        for waiter in self._waiting.pop(key, []):
            if not waiter.done():
                waiter.set_result(None)

    async def read(self, key: str) -> object:
        while key not in self._values:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._waiting.setdefault(key, []).append(waiter)
            await waiter
        return self._values[key]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The save after one step, the same on all ranks except those listed as deviating."""

    step: int
    tag: str
    save_latest: bool = True
    absent: int | None = None
    """The rank that never calls save()."""
    failing: int | None = None
    """The rank whose snapshot fails."""
    skipping: int | None = None
    thawed: bool = False
    """Leaves the frozen part of the state out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """The settings of a simulated job, shared by all its ranks."""

    seed: int
    world_size: int = 3
    steps: int = 3
    compression: str = "none"
    sidecars: bool = False
    """Whether each rank has a sidecar process, which persists its saves and outlives it."""
    deviations: bool = False
    """Whether ranks now and then skip, fail or forget a save, reuse a tag, or save without moving latest."""
    frozen: bool = False
    """Whether a part of the state never changes, so that saves refer to older checkpoints."""
    keeps: int | None = None
    """How many checkpoints retention keeps, after each commit and by collectors beside the job; None: all."""
    collectors: int = 0
    supersedes: bool = False
    """Whether saves of frozen state now and then leave the frozen part out, so that what a save under way refers to may be
    superseded; collectors are then far from the disk, and delete checkpoints by name, too."""
    name: str = "job"
    """The name of the job. If it is empty, each start must see that the start before it has gone."""
    lease_s: float = 6.0
    asks_sidecar: bool = True
    """Whether a start asks rank 0's sidecar for its attempts. Otherwise, as on another node, it knows only the leases."""
    readers: int = 0
    """The number of processes that read the newest checkpoint now and then."""
    read_back: bool = False
    """Whether each rank reads its shards back while it has no save in flight."""
    commit: CommitConfig = field(default_factory=lambda: CommitConfig(timeout_s=20.0, poll_min_s=0.02, poll_max_s=0.5))

    @property
    def persist(self) -> PersistConfig:
        return PersistConfig(
            compression="planes" if self.compression == "planes" else "none",
            chunk_bytes=4096,
            block_bytes=8192,
            budget_bytes=1 << 20,
            writes=2,
            encoders=2,
        )

    @property
    def retention(self) -> Retention:
        return Retention(keep_last=self.keeps)

    @property
    def committing(self) -> CommitConfig:
        return replace(self.commit, retention=self.retention, read_back=self.read_back)

    def plan(self, incarnation: int, step: int) -> SavePlan:
        """The save after `step`; the same on all ranks."""
        rng = random.Random(f"plan {self.seed} {incarnation} {step}")
        thawed = self.supersedes and random.Random(f"thaw {self.seed} {incarnation} {step}").random() < 0.4
        if not self.deviations:
            return SavePlan(step, default_tag(step), thawed=thawed)
        deviation = rng.choice(("none", "none", "none", "absent", "failing", "skipping"))
        rank = rng.randrange(self.world_size)
        reused = rng.random() < 0.3
        return SavePlan(
            step,
            tag=REUSED_TAG if reused else default_tag(step),
            save_latest=reused or rng.random() < 0.8,
            absent=rank if deviation == "absent" else None,
            failing=rank if deviation == "failing" else None,
            skipping=rank if deviation == "skipping" else None,
            thawed=thawed,
        )


@dataclass(slots=True, kw_only=True)
class Rank:
    """One rank of incarnation number `incarnation`; runs in the process `name`."""

    config: JobConfig
    incarnation: int
    rank: int
    name: str
    store: Store
    board: SimBoard
    ledger: Ledger
    rng: random.Random
    process: Process
    sight: Sight
    sidecar: Callable[[], SimSidecar] | None = None
    """The present sidecar of this rank's node; None if the job has no sidecars."""
    take_over: bool = False
    done: dict[str, Phase] = field(default_factory=dict)
    """The phase in which each attempt ended on this rank's handle."""
    _start: int = 0
    _saves: int = 0
    _saves_of_tag: Counter[str] = field(default_factory=Counter)
    _runner: SimRunner = field(init=False)
    _surviving: tuple[str, ...] = ()
    _lease: HeldLease | None = None
    _is_alone: bool = False
    """Whether its sidecar was lost, and the next one is not there yet, so that the rank persists its next save itself."""

    async def train(self) -> None:
        """Start, load, and save after every step up to the last. Raises CheckpointdError if starting or loading fails."""
        state = WriterState(store=self.store, persist=self.config.persist, commit=self.config.committing, sight=self.sight)
        self._runner = SimRunner(self.name, state, self.ledger)
        begun = await self._begin()
        self._start = begun.start
        await state.own_root.begun(begun.start, begun.nonce)
        first = await self._load()
        free = asyncio.Semaphore(IN_FLIGHT_MAX)
        async with asyncio.TaskGroup() as attempts:
            for step in range(first, first + self.config.steps):
                await asyncio.sleep(self.rng.random() * COMPUTE_S_MAX)
                plan = self.config.plan(self.incarnation, step)
                if plan.absent != self.rank:
                    await free.acquire()
                    attempts.create_task(self._save(plan, self._next_attempt(plan), free.release))
        await state.tidier.rest()
        if self._lease is not None:
            self.ledger.job_ends(self.name)
            await self._lease.release()

    # --- starting ----------------------------------------------------------------------------------------------

    async def _begin(self) -> BeginRecord:
        if self.rank == 0:
            try:
                self.board.post("start", await self._take_start())
            except CheckpointdError as error:
                self.board.post("start", error)
        heard = await self.board.read("start")
        if isinstance(heard, CheckpointdError):
            raise heard
        assert isinstance(heard, BeginRecord)
        return heard

    async def _take_start(self) -> BeginRecord:
        began = asyncio.get_running_loop().time()
        self.ledger.start_began(self.name, began, take_over=self.take_over)
        surviving = self.sidecar().in_flight() if self.sidecar is not None and self.config.asks_sidecar else ()
        beginner = Beginner(
            world_size=self.config.world_size,
            job=self.config.name,
            take_over=self.take_over,
            surviving=surviving,
            sight=self.sight,
        )
        taken = await begin(self.store, beginner)
        self._lease, self._surviving = taken.lease, taken.start.spared
        seconds = asyncio.get_running_loop().time() - began
        self.ledger.job_began(self.name, self.config.name, taken.start.start, seconds, self.config.lease_s)
        self.ledger.recovery_began(self.name, self._surviving)
        done = await recover(self.store, taken.before)
        self.ledger.recovery_ended(self.name)
        for decided in done.decided:
            self.ledger.learned(decided.attempt, decided, f"recovery by {self.name}")
        return taken.start

    async def _load(self) -> int:
        """The step from which training continues."""
        if self.rank == 0:
            self.board.post("candidate", await self._newest())
        chosen = await self.board.read("candidate")
        if chosen is None:
            return 0
        assert isinstance(chosen, LoggedAttempt)
        try:
            contents = await read_contents(self.store, chosen, self.rank)
        except CheckpointdError as error:
            if self.name not in self.ledger.refused and await self._is_newest():
                raise InvariantError("latest-whole", f"{self.name} cannot load {chosen.prefix}: {error}") from error
            raise
        self.ledger.loaded(self.rank, chosen, contents)
        return chosen.commit.step + 1

    async def _newest(self) -> LoggedAttempt | None:
        """The checkpoint that load() takes. `latest` names it, unless a spared attempt was committed just now."""
        floor = self.ledger.newest
        found = candidates(await root_view.state_of(self.store))
        newest = found[0] if found else None
        if await self._is_newest():
            self.ledger.not_older(newest, floor, self.name)
            if not self._surviving and not self.ledger.excuses(self.name) and (fault := self.ledger.latest_fault()):
                raise InvariantError("latest-follows", f"after the recovery by {self.name}, {fault}")
        return newest

    async def _is_newest(self) -> bool:
        return await starts.newest(self.store) == self._start

    # --- saving ------------------------------------------------------------------------------------------------

    def _next_attempt(self, plan: SavePlan) -> AttemptInfo:
        info = AttemptInfo(
            tag=plan.tag,
            attempt=AttemptId(self._start, self._saves_of_tag[plan.tag]),
            rank=self.rank,
            world_size=self.config.world_size,
            step=plan.step,
            n=self._saves,
            save_latest=plan.save_latest,
        )
        self._saves_of_tag[plan.tag] += 1
        self._saves += 1
        return info

    async def _save(self, plan: SavePlan, info: AttemptInfo, free: Callable[[], None]) -> None:
        contents = tensors_of(
            f"{self.config.seed} {info.prefix} {self.rank} {self.incarnation}", layout=f"{self.config.seed} {self.rank}"
        )
        if self.config.frozen and not plan.thawed:
            contents = {**contents, **frozen_tensors(f"{self.config.seed} {self.rank}", contents)}
        self.ledger.save_called(info.prefix, self.rank, contents)
        is_alone, self._is_alone = self._is_alone, False
        if self.sidecar is None or is_alone:
            attempt = await self._runner.run(info, self._staged(plan, contents), free)
        else:
            attempt = await self._handed_over(info, asyncio.create_task(self._staged(plan, contents)), self.sidecar)
            free()
        self.done[info.prefix] = attempt.phase

    async def _handed_over(self, info: AttemptInfo, taking: asyncio.Task[Shard], sidecar: Callable[[], SimSidecar]) -> Attempt:
        """The attempt, run by the sidecar or, if that is lost, followed by this process, which votes no."""
        snapshot = snapshot_of(self.process, taking, StagingError(f"{self.name} died while its snapshot was being taken"))
        current = sidecar()
        work = current.begin(info, snapshot)
        ended: list[asyncio.Future[Any]] = [work, current.lost]
        await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
        if work.done() and (attempt := work.result()) is not None:
            return attempt
        self._is_alone = self.rng.random() < 0.5
        lost = ErrorReport(code=SidecarError.__name__, message=f"{current.name} was lost", phase=str(Phase.PERSISTING))
        return await self._runner.run(info, None, lost=lost)

    async def _staged(self, plan: SavePlan, contents: Contents) -> Shard:
        await asyncio.sleep(self.rng.random())
        if plan.failing == self.rank:
            raise StagingError("the snapshot was torn, as the schedule asks")
        if plan.skipping == self.rank:
            raise SkippedError("skipped, as the schedule asks")
        return make_shard(contents)


def tensors_of(seed: str, layout: str) -> Contents:
    """The state of one rank for one save: a few small tensors of random bytes, different in every save. `layout`: the seed of
    their sizes, which stay the same, so that a coordinator knows the plan of each rank after the first save.
    """
    rng, sizes = random.Random(seed), random.Random(f"layout {layout}")
    return {
        "model.weight": rng.randbytes(4 * sizes.randrange(300, 1500)),
        "model.bias": rng.randbytes(4 * sizes.randrange(1, 40)),
        "model.empty": b"",
        "optimizer.step": rng.randbytes(4),
    }


def frozen_tensors(seed: str, moving: Contents) -> Contents:
    """The frozen part of a rank's state: whole tensors, and the beginning of a tensor whose end changes with `moving`."""
    rng = random.Random(f"frozen {seed}")
    return {
        "model.frozen": rng.randbytes(4 * 1500),
        "model.partly": rng.randbytes(4096) + moving["optimizer.step"],
        "model.constant": rng.randbytes(8),
    }


def make_shard(contents: Contents) -> Shard:
    """`contents` as a snapshot: float32 vectors at 64-byte offsets of a page-aligned buffer."""
    tensors: list[ShardTensor] = []
    offset = 0
    for fqn, data in contents.items():
        shape = (len(data) // 4,)
        tensors.append(ShardTensor(fqn, "float32", shape, whole(shape), "rank", offset, len(data), 4))
        offset += aligned(len(data))
    buffer = page_buffer(page_up(offset))
    for tensor, data in zip(tensors, contents.values(), strict=True):
        buffer[tensor.offset : tensor.offset + tensor.nbytes] = np.frombuffer(data, np.uint8)
    return Shard(buffer=buffer, tensors=tuple(tensors), tree=b"\xc0")


async def read_contents(store: Store, checkpoint: LoggedAttempt, rank: int) -> Contents:
    """Every tensor of `rank`, read and verified by the real loader; raises the first damage."""
    index = await read_index(store, checkpoint, rank)
    found = {entry.fqn: bytearray(sum(chunk.raw for chunk in entry.chunks)) for entry in index.tensors}

    def sink(fqn: str) -> Callable[[int, Bytes], None]:
        def take(start: int, raw: Bytes) -> None:
            found[fqn][start : start + raw.nbytes] = raw.tobytes()

        return take

    sinks = {fqn: sink(fqn) for fqn in found}
    damage = await read_tensors(store, checkpoint.prefix, index, sinks, LoadConfig(reads=2, block_bytes=8192))
    if damage:
        raise damage[0]
    return {fqn: bytes(data) for fqn, data in found.items()}
