"""Collection loses nothing: a crash at every effect of it, alone and beside saves that refer to what it removes, two at once.

COLLECT-1 and COLLECT-2 of `pipeline/gc/collect.py` and LOG-10; each mutation leaves one of them out, and must be caught.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest

from checkpointd.admin.gc import collection, deletion
from checkpointd.commit.machine import Phase
from checkpointd.commit.retention import Retention
from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError
from checkpointd.layout.keys import AttemptId, object_rank
from checkpointd.pipeline.attempt import Attempt, WriterState
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.shard import AttemptInfo, Shard
from checkpointd.pipeline.write.dedup import Base, Bases
from checkpointd.store.base import Store
from checkpointd.testing import simloop
from checkpointd.testing.crashpoints import Crash, Scenario, every_crash_point
from checkpointd.testing.job.simjob import run_schedule
from checkpointd.testing.job.simledger import Contents
from checkpointd.testing.job.simrank import JobConfig, frozen_tensors, make_shard, read_contents, tensors_of
from checkpointd.testing.job.simroot import BucketRoot, DiskRoot, SimRoot
from checkpointd.testing.job.simschedule import Kill, PowerCut, Schedule, Storage
from checkpointd.testing.simbucket import SimBucket
from checkpointd.testing.simdisk import SimDisk
from checkpointd.testing.simstorage import SimStorage
from tests.simulation.named_seeds import NamedSeeds
from tests.simulation.test_job_mutations import references_ignored, removed_before_its_record

# Thousands of runs in virtual time: a busy machine needs minutes for the largest.
pytestmark = pytest.mark.timeout(600)

RANKS = 2
PERSIST = PersistConfig(compression="none", chunk_bytes=4096, block_bytes=8192, budget_bytes=1 << 20, writes=2, encoders=2)
COMMIT = CommitConfig(timeout_s=30.0, poll_min_s=0.02, poll_max_s=0.5, read_back=False)
Patch = pytest.MonkeyPatch


def state_of(step: int, rank: int) -> Contents:
    moving = tensors_of(f"{step} {rank}")
    return {**moving, **frozen_tensors(str(rank), moving)}


@dataclass
class World:
    """Two ranks that save mostly frozen state, and what collects beside them, at one root."""

    storage: Storage = "disk"
    root: SimRoot = field(init=False)
    committed: set[str] = field(default_factory=set)
    start: int = 0
    states: dict[int, WriterState] = field(default_factory=dict)
    ranks: dict[int, simloop.Process] = field(default_factory=dict)
    processes: int = 0

    def __post_init__(self) -> None:
        if self.storage == "bucket":
            self.root = BucketRoot(SimBucket(page=8, weather={"repeated": 0.01}))
        else:
            self.root = DiskRoot(SimDisk(root="/root"), lambda writer: writer in self.sim.alive())

    @property
    def sim(self) -> SimStorage:
        return self.root.storage

    def process(self, name: str, *, far: bool = False) -> tuple[simloop.Process, Store]:
        self.processes += 1
        return self.root.store(f"{name}.{self.processes}", far=far)

    def spawn(self, work: Callable[[Store], Awaitable[None]], name: str, *, far: bool = False) -> asyncio.Task[None]:
        process, store = self.process(name, far=far)

        async def run() -> None:
            await work(store)

        return process.spawn(run())

    async def begin(self) -> None:
        """A new job: the next start, recovery, and writers that know of no checkpoint yet."""

        async def begin(store: Store) -> None:
            before = await RootLog.of(store).look(settles=True)
            self.start = (await starts.take(store, RANKS)).start
            await recover(store, before)

        await self.spawn(begin, "start")
        for rank in range(RANKS):
            self.ranks[rank], store = self.process(f"rank{rank}")
            self.states[rank] = WriterState(store=store, persist=PERSIST, commit=COMMIT)

    def saving(self, step: int, tag: str | None = None, k: int = 0) -> list[asyncio.Task[None]]:
        """One save of all ranks, under way."""
        return [self.ranks[rank].spawn(self._save(rank, step, tag or f"step{step}", k)) for rank in range(RANKS)]

    async def _save(self, rank: int, step: int, tag: str, k: int) -> None:
        info = AttemptInfo(tag=tag, attempt=AttemptId(self.start, k), rank=rank, world_size=RANKS, step=step, n=step)
        attempt = Attempt(self.states[rank], info, deadline=asyncio.get_running_loop().time() + COMMIT.timeout_s)

        async def staged() -> Shard:
            return make_shard(state_of(step, rank))

        await attempt.run(staged())
        if attempt.phase is Phase.COMMITTED:
            self.committed.add(tag)
        else:
            assert attempt.error is not None
            raise attempt.error

    async def saved(self, *steps: int) -> None:
        for step in steps:
            await asyncio.gather(*self.saving(step))

    def collecting(self, keep: int, *, far: bool = False) -> asyncio.Task[None]:
        async def run(store: Store) -> None:
            await collection(store, Retention(keep_last=keep), dry_run=False)

        return self.spawn(run, "gc", far=far)

    def deleting(self, tag: str) -> asyncio.Task[None]:
        async def run(store: Store) -> None:
            with suppress(NotFoundError):  # a collector was quicker
                await deletion(store, tag, force=False, dry_run=False)

        return self.spawn(run, "delete")

    def wrote_anew(self) -> int:
        """The number of ranks that do not refer to step 1 any more, after its removal."""
        names = [name for attempt in self.root.names("step1") for name in self.root.names(f"step1/{attempt}")]
        return RANKS - len({object_rank(name) for name in names if name.endswith(".chunks")})

    async def check(self, newest: int) -> None:
        """Every checkpoint loads as it was saved, and the newest is of step `newest` or later."""

        async def look(store: Store) -> None:
            found = await root_view.checkpoints(store)
            assert found
            assert found[0].commit.step >= newest
            for checkpoint in found:
                for rank in range(RANKS):
                    contents = await read_contents(store, checkpoint, rank)
                    assert contents == state_of(checkpoint.commit.step, rank), checkpoint.prefix

        await self.spawn(look, "checker")


async def aftermath(world: World, newest: int) -> None:
    """After whatever happened: what is there is whole, and a new job collects, saves and refers as ever."""
    await world.check(newest)
    await world.begin()
    await world.check(newest)
    await world.collecting(1)
    await world.check(newest)
    await world.saved(20, 21)
    await world.collecting(1)
    await world.check(21)


def collection_alone(keep: int, storage: Storage = "disk") -> Scenario:
    async def scenario(crash: Crash) -> bool:
        world = World(storage)
        await world.begin()
        await world.saved(1, 2, 3)
        struck = await crash.strikes(world.sim, [world.collecting(keep)])
        if struck and not world.sim.alive():
            await aftermath(world, 3)
            return True
        world.sim.after = lambda *_: None
        await aftermath(world, 3)
        return struck

    return scenario


def collection_beside_a_save(keep: int, storage: Storage = "disk") -> Scenario:
    async def scenario(crash: Crash) -> bool:
        world = World(storage)
        await world.begin()
        await world.saved(1, 2)
        # Not the newest alone: the writers' base may be one that is being removed, where a save under way missed the commit.
        struck = await crash.strikes(world.sim, [world.collecting(keep), *world.saving(3), world.collecting(keep)])
        world.sim.after = lambda *_: None
        newest = 3 if "step3" in world.committed else 2
        world.sim.power_cut()
        await aftermath(world, newest)
        return struck

    return scenario


LEAST: dict[Storage, int] = {"disk": 40, "bucket": 4}
"""So many effects a collection has; a save beside it has more than twice as many."""
on_each = pytest.mark.parametrize("storage", ["disk", "bucket"])


@on_each
@pytest.mark.parametrize("keep", [1, 2])
def test_power_cut_at_every_effect_of_a_collection(keep: int, storage: Storage, stride: int) -> None:
    assert every_crash_point(collection_alone(keep, storage), range(2), stride=stride) * stride > LEAST[storage]


@on_each
def test_kill_at_every_effect_of_a_collection(storage: Storage, stride: int) -> None:
    kill = lambda sim, effect: sim.kill(effect.process)  # noqa: E731
    assert every_crash_point(collection_alone(1, storage), range(2), kill, stride=stride) * stride > LEAST[storage]


@on_each
def test_power_cut_at_every_effect_of_a_save_and_two_collections(storage: Storage, stride: int) -> None:
    assert every_crash_point(collection_beside_a_save(1, storage), range(1), stride=stride) * stride > 2 * LEAST[storage]


# --- whoever holds an old base ------------------------------------------------------------------------------------


def base_of(bases: Bases) -> Base | None:
    """What the next save would refer to."""
    return bases._base if bases._seen is None else Base.of(*bases._seen)


def set_base(bases: Bases, base: Base | None) -> None:
    bases._base, bases._seen = base, None


async def old_base(world: World) -> None:
    """The writers still refer to what a collection removes: they have not seen the newer commits."""
    await world.begin()
    await world.saved(1)
    known = {rank: base_of(state.bases) for rank, state in world.states.items()}
    await world.saved(2, 3)
    # All tensors of step 1 are written anew in a tag that refers to nothing of it, so that step 1 is needed by nobody.
    for rank, state in world.states.items():
        set_base(state.bases, None)
        state.persist = replace(PERSIST, dedup=False)
        assert rank in known
    await world.saved(4)
    for rank, state in world.states.items():
        state.persist = PERSIST
        set_base(state.bases, known[rank])


COLLECTS_S: dict[Storage, float] = {"disk": 0.2, "bucket": 4.0}
"""Most of the time that a collection takes: a save that begins within it may come before or after its record."""


def races(seeds: Sequence[int], storage: Storage = "disk") -> int:
    """Saves that refer to step 1 while it is being removed; how many of their ranks wrote all of it anew."""
    anew = 0

    async def main() -> int:
        world = World(storage)
        await old_base(world)
        collecting = world.collecting(1)
        await asyncio.sleep(COLLECTS_S[storage] * world.sim.rng.random())
        await asyncio.gather(collecting, *world.saving(5))
        world.sim.power_cut()
        await world.check(5)
        anew = world.wrote_anew()
        await aftermath(world, 5)
        return anew

    for seed in seeds:
        anew += simloop.run(seed, main())
    return anew


@on_each
def test_a_save_races_the_removal_of_what_it_refers_to(storage: Storage, stride: int) -> None:
    """LOG-10: it commits whatever happens, since it refers to nothing that is older than its base."""
    seeds = range(max(6, 270 // stride))
    assert races(seeds, storage) == RANKS * len(seeds)


# --- two collections and a save whose base is superseded ----------------------------------------------------------


def superseded(seeds: Sequence[int], storage: Storage = "disk", save_s: float = 5.0) -> int:
    """Saves whose base is deleted while two collectors look at the object that both refer to; how many ranks wrote all anew.

    The collectors take about eight seconds each, so that all of it overlaps. The save begins `save_s` seconds after the first
    of them, or up to three seconds later.
    """

    async def main() -> int:
        world = World(storage)
        await world.begin()
        await world.saved(1, 2)
        known = {rank: base_of(state.bases) for rank, state in world.states.items()}
        for state in world.states.values():
            state.persist = replace(PERSIST, dedup=False)
        await world.saved(3)
        for rank, state in world.states.items():
            state.persist = PERSIST
            set_base(state.bases, known[rank])
        await world.collecting(2)  # step 1 is removed, but for what step 2 refers to
        rng = world.sim.rng

        async def later(first_s: float, begin: Callable[[], Sequence[asyncio.Task[None]]]) -> None:
            await asyncio.sleep(first_s + 3 * rng.random())
            await asyncio.gather(*begin())

        await asyncio.gather(
            world.collecting(2, far=True),
            later(0.0, lambda: [world.collecting(2, far=True)]),
            later(2.0, lambda: [world.deleting("step2")]),
            later(save_s, lambda: world.saving(4)),
        )
        world.sim.power_cut()
        await world.check(4)
        anew = world.wrote_anew()
        await aftermath(world, 4)
        return anew

    return sum(simloop.run(seed, main()) for seed in seeds)


@on_each
def test_two_collections_beside_a_save_whose_base_is_superseded(storage: Storage, stride: int) -> None:
    """COLLECT-2: the save commits, with references that hold or with everything written anew; both are seen."""
    seeds = range(max(8, 360 // stride))
    assert 0 < superseded(seeds, storage) < RANKS * len(seeds)


# --- mutations ----------------------------------------------------------------------------------------------------


def test_references_to_what_is_older_than_the_base_are_caught(monkeypatch: Patch, named_seeds: NamedSeeds) -> None:
    """The log then refuses the commit."""
    monkeypatch.setattr(Attempt, "_allowed", lambda _, base: base)

    def breaks(seed: int) -> str | None:
        try:
            races([seed])
        except CheckpointdError as error:
            return str(error)
        return None

    _, broken = named_seeds.caught("collection: references to what is older", breaks, range(300))
    assert "refers to objects that may be gone: step1/" in broken


@pytest.mark.parametrize("mutate", [removed_before_its_record, references_ignored])
def test_mutations_of_the_order_are_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(DamagedError, match=r"there is no object 'step[12]/"):
        every_crash_point(collection_alone(1), range(4), stride=4)


# --- whole jobs ---------------------------------------------------------------------------------------------------


@pytest.mark.nightly
@pytest.mark.parametrize("keeps", [1, 2])
def test_jobs_with_retention_and_collectors_lose_nothing(keeps: int) -> None:
    for seed in range(10):
        job = JobConfig(seed=seed, steps=4, frozen=True, keeps=keeps, collectors=1)
        report = run_schedule(Schedule(job=job))
        assert report.aborted == 0
        assert 0 < report.committed <= keeps + 1


@pytest.mark.nightly
def test_jobs_that_supersede_what_others_refer_to_lose_nothing() -> None:
    reports = [
        run_schedule(Schedule(job=JobConfig(seed=seed, steps=6, frozen=True, keeps=2, collectors=2, supersedes=True)))
        for seed in range(10)
    ]
    assert all(report.aborted == 0 and report.committed > 0 for report in reports)
    assert sum(report.collected for report in reports) > 10


def test_power_cut_at_effects_of_a_job_with_retention_and_a_collector(stride: int) -> None:
    job = JobConfig(seed=2, world_size=2, steps=2, frozen=True, keeps=1, collectors=1)
    for number in range(1, 400, 5 * stride):
        run_schedule(Schedule(job=job, faults=((number, PowerCut()),)))


def test_kill_of_whoever_acts_in_a_job_with_retention_and_collectors(stride: int) -> None:
    job = JobConfig(seed=3, world_size=2, steps=2, frozen=True, keeps=1, collectors=2)
    for number in range(1, 400, 5 * stride):
        run_schedule(Schedule(job=job, faults=((number, Kill()),)))
