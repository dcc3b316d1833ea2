"""A mirror at every crash point: whatever a power cut or a kill leaves there is whole, and the next run finishes the work.

MIRROR-2, MIRROR-4, MIRROR-8 and MIRRORCOPY-1 to MIRRORCOPY-4 of `mirror/`; each mutation leaves a step out, and must be caught.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError
from checkpointd.mirror import copying, transfer
from checkpointd.mirror.copying import CheckpointCopy
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.outcome.starting import begin
from checkpointd.pipeline.read.index import read_index
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing.crashpoints import Crash, Scenario, every_crash_point
from checkpointd.testing.simdisk import Effect, SimDisk
from tests.builders import attempts_at
from tests.simulation.named_seeds import NamedSeeds
from tests.unit.mirror.origins import check_whole, delete, origin_with, save, tags_of, whole_ones

pytestmark = pytest.mark.timeout(600)

ROOT = "/root/run"
How = Callable[[SimDisk, Effect], None]


def kill(disk: SimDisk, effect: Effect) -> None:
    disk.kill(effect.process)


class World:
    """An origin, and a disk on which its mirror lies."""

    def __init__(self, origin: MemoryStore, rules: Retention) -> None:
        self.origin, self.rules = origin, rules
        self.disk = SimDisk(root="/root")
        self.processes = 0

    def spawn(self, work: Callable[[Store], Any]) -> Any:
        self.processes += 1
        name = f"mirror.{self.processes}"
        disk = self.disk.process(name)
        store = PosixStore(ROOT, disk, writer=name, is_alive=lambda writer: writer in self.disk.alive())
        return disk.process.spawn(work(store))

    async def mirror(self, store: Store) -> None:
        """One run, as the command does it."""
        mirroring = Mirroring(self.origin, store, MirrorConfig(rules=self.rules))
        await mirroring.begin()
        try:
            await mirroring.step()
        finally:
            await mirroring.end()

    async def check(self, store: Store) -> None:
        await check_whole(store, self.origin)

    async def start(self, store: Store) -> None:
        """A job starts at the mirror, since the origin is lost."""
        taken = await begin(store, Beginner(world_size=2, take_over=True))
        await recover(store, taken.before)
        await taken.lease.release()
        assert "undecided" not in {one.status for one in await attempts_at(store)}


def run_at_every_point(*steps: int, rules: Retention, goes_on: bool, before: int = 1) -> Scenario:
    """The mirror has the first `before` checkpoints; the run that copies the others is struck."""

    async def scenario(crash: Crash) -> bool:
        first = await origin_with(*steps[:1])
        world = World(first, Retention())
        if before:
            await world.spawn(world.mirror)
            world.disk.kill("mirror.1")
            world.disk.fs.make_all_durable()
        for step in steps[1:]:
            await save(first, step)
        world.rules = rules
        struck = await crash.strikes(world.disk, [world.spawn(world.mirror)])
        world.disk.after = lambda *_: None
        world.disk.power_cut()
        await world.spawn(world.check)
        if goes_on:
            await world.spawn(world.start)
            await world.spawn(world.check)
            return struck
        await world.spawn(world.mirror)
        world.disk.power_cut()
        await world.spawn(world.check)

        async def newest(store: Store) -> None:
            assert (await tags_of(store))[:1] == [f"global_step{steps[-1]}"]
            assert await root_view.latest(store) == f"global_step{steps[-1]}"

        await world.spawn(newest)
        return struck

    return scenario


@pytest.mark.parametrize("rules", [Retention(), Retention(keep_last=1)], ids=["all", "last"])
@pytest.mark.parametrize("how", [None, kill], ids=["power cut", "kill"])
def test_a_crash_at_every_effect_of_a_run(rules: Retention, how: How | None, stride: int) -> None:
    scenario = run_at_every_point(1, 2, 3, rules=rules, goes_on=False)
    assert every_crash_point(scenario, range(1), how, stride=stride) * stride > 100


@pytest.mark.parametrize("before", [1, 0], ids=["the holder is a checkpoint", "the holder is left out"])
def test_a_job_starts_at_a_mirror_whose_run_was_cut_off_anywhere(before: int, stride: int) -> None:
    scenario = run_at_every_point(1, 2, 3, rules=Retention(keep_last=1), goes_on=True, before=before)
    assert every_crash_point(scenario, range(1), stride=stride) * stride > (100 if before else 50)


def give_up_at_every_point() -> Scenario:
    """The run is struck while it copies the second checkpoint, which the origin then removes."""

    async def scenario(crash: Crash) -> bool:
        world = World(await origin_with(1), Retention())
        await world.spawn(world.mirror)
        world.disk.fs.make_all_durable()
        await save(world.origin, 2, dedup=False)
        struck = await crash.strikes(world.disk, [world.spawn(world.mirror)])
        world.disk.after = lambda *_: None
        world.disk.power_cut()
        await save(world.origin, 3, dedup=False)
        await delete(world.origin, "global_step2")
        await world.spawn(world.mirror)
        await world.spawn(world.check)

        async def nothing_is_left(store: Store) -> None:
            known = (await root_view.state_of(store)).attempts
            assert {f"{tag}/{attempt}" for tag, attempt in await root_view.directories(store)} <= known.keys()

        await world.spawn(nothing_is_left)
        return struck

    return scenario


@pytest.mark.parametrize("how", [None, kill], ids=["power cut", "kill"])
def test_what_was_begun_and_is_not_wanted_any_more_does_not_stay(how: How | None, stride: int) -> None:
    assert every_crash_point(give_up_at_every_point(), range(1), how, stride=stride) * stride > 40


# --- what is healed -----------------------------------------------------------------------------------------------

HELD = "global_step1/00000001-0/00000-0.chunks"


async def damage(store: Store) -> None:
    """Flip a bit of a tensor of rank 0 in the first checkpoint, and read that back, which records that it is damaged."""
    checkpoint = await root_view.find(store, "global_step1")
    index = await read_index(store, checkpoint, 0)
    data = bytearray(await store.get(HELD))
    data[next(entry for entry in index.tensors if entry.fqn == "moving").chunks[0].offset] ^= 1
    await store.put(HELD, bytes(data))
    assert not (await read_back(store, checkpoint)).whole


def heal_at_every_point(*, goes_on: bool) -> Scenario:
    """The object that three checkpoints need has a wrong bit at the mirror, in a part that the first alone needs."""

    async def scenario(crash: Crash) -> bool:
        world = World(await origin_with(1, 2, 3), Retention())
        await world.spawn(world.mirror)
        await world.spawn(damage)
        world.disk.fs.make_all_durable()

        async def whole(store: Store, *steps: int) -> None:
            assert set(await whole_ones(store)) >= {f"global_step{step}" for step in steps}
            assert await tags_of(store) == ["global_step3", "global_step2", "global_step1"]

        struck = await crash.strikes(world.disk, [world.spawn(world.mirror)])
        world.disk.after = lambda *_: None
        world.disk.power_cut()
        await world.spawn(lambda store: whole(store, 2, 3))
        if goes_on:
            await world.spawn(world.start)
        else:
            await world.spawn(world.mirror)
            world.disk.power_cut()
        await world.spawn(lambda store: whole(store, 2, 3) if goes_on else whole(store, 1, 2, 3))
        return struck

    return scenario


@pytest.mark.parametrize("how", [None, kill], ids=["power cut", "kill"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["another run", "a job starts"])
def test_a_crash_at_every_effect_of_a_run_that_heals(how: How | None, goes_on: bool, stride: int) -> None:
    assert every_crash_point(heal_at_every_point(goes_on=goes_on), range(1), how, stride=stride) * stride > 40


# --- mutations ----------------------------------------------------------------------------------------------------


def _without_objects(patch: pytest.MonkeyPatch) -> None:
    """The commit does not wait for the objects of older attempts."""
    original = CheckpointCopy._copy_object

    async def own_only(self: CheckpointCopy, named: Any, *others: Any) -> None:
        if not named.held_by:
            await original(self, named, *others)

    patch.setattr(CheckpointCopy, "_copy_object", own_only)


def _trusting_names(patch: pytest.MonkeyPatch) -> None:
    """An object of the right size counts as whole."""

    async def whole(*_: object) -> bool:
        return True

    patch.setattr(copying, "is_whole", whole)


def _unfinished(patch: pytest.MonkeyPatch) -> None:
    """The commit does not wait until the objects are durable."""
    original = transfer.copied

    async def hasty(source: Store, destination: Store, key: str, size: int, pieces: Any, **others: Any) -> None:
        class Hasty:
            def __init__(self, writer: Any) -> None:
                self._writer = writer

            async def write_at(self, offset: int, data: Any) -> None:
                await self._writer.write_at(offset, data)

            async def finish(self, size: int) -> None:
                return

            async def discard(self) -> None:
                await self._writer.discard()

        class To:
            async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> Any:
                return Hasty(await destination.open_writer(key, size_hint=size_hint, size_max=size_max))

            async def open_replacement(self, key: str, *, size_hint: int = 0) -> Any:
                return Hasty(await destination.open_replacement(key, size_hint=size_hint))

        await original(source, To(), key, size, pieces, **others)  # type: ignore[arg-type]

    patch.setattr(copying, "copied", hasty)


def _without_note(patch: pytest.MonkeyPatch) -> None:
    """The record of the mirror does not say what was begun."""

    async def nothing(*_: object) -> None:
        return

    patch.setattr(Mirroring, "_note", nothing)


def _removing_first(patch: pytest.MonkeyPatch) -> None:
    """A damaged object is removed before it is copied again."""
    original = CheckpointCopy._transfer

    async def transfer(self: CheckpointCopy, key: str, size: int, pieces: Any, *, replaces: bool = False) -> None:
        if replaces:
            await self.mirror.delete(key)
        await original(self, key, size, pieces)

    patch.setattr(CheckpointCopy, "_transfer", transfer)


MUTATIONS = {one.__name__: one for one in (_without_objects, _trusting_names, _unfinished, _without_note, _removing_first)}


@contextmanager
def mutated(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        yield


def _crashes(number: int) -> None:
    """What is tried under a seed: in turn, the next run goes on, or a job starts at the mirror."""
    rules, goes_on, seed = Retention(keep_last=1), number % 2 == 1, number // 10
    match number // 2 % 5:
        case 0:
            every_crash_point(heal_at_every_point(goes_on=goes_on), [seed], stride=2)
        case 1:
            every_crash_point(run_at_every_point(1, 2, 3, rules=rules, goes_on=goes_on, before=0), [seed], stride=3)
        case 2:
            every_crash_point(run_at_every_point(1, 2, 3, rules=rules, goes_on=goes_on), [seed], stride=3)
        case 3:
            every_crash_point(give_up_at_every_point(), [seed], stride=3)
        case _:
            every_crash_point(run_at_every_point(2, 3, 4, rules=rules, goes_on=goes_on), [seed], kill, stride=3)


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_caught(name: str, named_seeds: NamedSeeds) -> None:
    def breaks(seed: int) -> str | None:
        try:
            with mutated(name):
                _crashes(seed)
        except (AssertionError, CheckpointdError) as error:
            return str(error) or "an assertion"
        return None

    named_seeds.caught(f"mirror: {name}", breaks, range(24))
