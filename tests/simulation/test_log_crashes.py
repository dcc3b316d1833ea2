"""The log of a root at every crash point of a disk: whatever a power cut leaves, a look finds all that was reported.

LOG-5, LOG-6 and LOG-11. Each planted mistake leaves a step out, and must be found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from checkpointd.commit import log_access
from checkpointd.errors import CheckpointdError, UnreadableError
from checkpointd.layout.log_records import LogState, Record, entry_key
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root_id import made_id
from checkpointd.store.base import Store
from checkpointd.store.passing import PassingStore
from checkpointd.testing.crashpoints import Crash, Scenario, every_crash_point
from checkpointd.testing.storecrashes import CrashWorld
from tests.logs import announce, begin, name
from tests.simulation.named_seeds import NamedSeeds

pytestmark = pytest.mark.timeout(600)

View = Callable[[Store], Store]
"""What a process under test sees of a store: a planted mistake changes it."""
SEEDS, STRIDE = range(3), 13
SEEDS_MAX = 40
"""Seeds that are searched where none is named."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state after each third entry, of which two stay; and few syncs of the names above the root, which are others' tests."""
    monkeypatch.setattr(log_access, "STATE_EVERY", 3)
    monkeypatch.setattr(log_access, "STATES_KEPT", 2)


class Undurable(PassingStore):
    """A planted mistake: objects of this kind are put without a sync."""

    ending = ".json"

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await super().put_if_absent(key, data, durable=durable and not key.endswith(self.ending))


class UndurableStates(Undurable):
    ending = ".state"


class SettlesNothing(PassingStore):
    async def settle(self, key: str) -> None:
        """A planted mistake."""


# --- scenarios --------------------------------------------------------------------------------------------------------


async def cut(crash: Crash, world: CrashWorld, *work: Callable[[Store], Any]) -> bool:
    """Run each in a process until the power is cut, at the crash point or else at the end; whether that came first."""
    struck = await crash.strikes(world.disk, [world.spawn(f"process {at}", one) for at, one in enumerate(work)])
    world.disk.after = lambda *_: None  # what comes now is not struck
    if not struck:
        world.disk.power_cut()
    return struck


async def prepare(store: Store) -> None:
    await made_id(store)
    await RootLog(store).add(begin())


async def found(world: CrashWorld, reported: set[str]) -> LogState:
    """What a process after the crash reads. It goes on appending, and the next one reads that, too."""

    async def look(store: Store) -> LogState:
        log = RootLog(store)
        state = await log.look(settles=True)
        assert log.fault == "", log.fault
        assert await log.add(announce(900)) == ""
        await log.compact()
        again = RootLog(store)
        assert (await again.look(), again.fault) == (log.state, "")
        return state

    state: LogState = await world.honest("after", look)
    assert reported <= state.attempts.keys(), f"{sorted(reported - state.attempts.keys())} were reported, and are lost"
    return state


def appends(view: View = lambda store: store) -> Scenario:
    """Two processes append and compact. A third follows them and reports what it has seen."""

    async def scenario(crash: Crash) -> bool:
        world, reported = CrashWorld(), set[str]()
        await world.honest("before", prepare)

        def process(first: int) -> Callable[[Store], Any]:
            async def work(store: Store) -> None:
                log = RootLog(view(store))
                await log.look()
                for number in range(first, first + 5):
                    assert await log.add(announce(number)) == ""
                    reported.add(name(number))
                    await log.compact()

            return work

        async def follow(store: Store) -> None:
            log = RootLog(view(store))
            await log.look()
            for number in (103, 203):
                while not await log.follow(lambda state, number=number: name(number) in state.attempts):  # type: ignore[misc]
                    await asyncio.sleep(0.01)
                reported.update(log.state.attempts)
            reported.update((await log.look(settles=True)).attempts)

        struck = await cut(crash, world, process(100), process(200), follow)
        await found(world, reported)
        return struck

    return scenario


def reports(view: View = lambda store: store) -> Scenario:
    """A process dies while it appends. Another one reports what it has read, and then the power is cut."""

    async def scenario(crash: Crash) -> bool:
        world, reported = CrashWorld(), set[str]()
        await world.honest("before", prepare)

        async def work(store: Store) -> None:
            log = RootLog(store)
            for number in range(1, 4):
                await log.add(announce(number))

        async def read(store: Store) -> None:
            reported.update((await RootLog(view(store)).look(settles=True)).attempts)

        kill = Crash(crash.number, lambda disk, effect: disk.kill(effect.process))
        struck = await kill.strikes(world.disk, [world.spawn("writer", work)])
        world.disk.after = lambda *_: None
        await world.spawn("reader", read)
        world.disk.power_cut()
        await found(world, reported)
        return struck

    return scenario


def rebuilds(view: View = lambda store: store) -> Scenario:
    """Two starts make a log again, and append to it. A process that knows the old log appends, too."""

    async def scenario(crash: Crash) -> bool:
        world, reported = CrashWorld(), set[str]()
        known = list[LogState]()

        async def damage(store: Store) -> None:
            await prepare(store)
            log = RootLog(store)
            for number in range(1, 8):
                await log.add(announce(number))
                await log.compact()
            known.append(log.state)
            await store.put(entry_key(8), b"x")

        await world.honest("before", damage)

        def start(at: int) -> Callable[[Store], Any]:
            async def decide(state: LogState) -> Sequence[Record]:
                return [] if state.start == 2 else [begin(2, nonce="0" * 32)]

            async def work(store: Store) -> None:
                log = RootLog(view(store))
                state = await log.rebuild(decide)
                reported.update(state.attempts)
                for number in range(at, at + 3):
                    assert await log.add(announce(number, start=2)) == ""
                    reported.add(name(number, start=2))
                    await log.compact()

            return work

        async def old(store: Store) -> None:
            log = RootLog(view(store))
            await log.goes_on_from(known[0])
            try:
                if not await log.add(announce(50)):
                    reported.add(name(50))
            except UnreadableError:  # the log is being made again
                return

        struck = await cut(crash, world, start(10), start(20), old)

        async def finish(store: Store) -> None:
            async def decide(state: LogState) -> Sequence[Record]:
                return [begin(state.start + 1)]

            log = RootLog(store)
            state = await log.rebuild(decide)
            assert log.fault == ""
            lost = reported - state.attempts.keys()
            assert not lost, lost

        await world.honest("the next start", finish)
        return struck

    return scenario


@pytest.mark.parametrize("make", [appends, reports, rebuilds])
def test_every_crash_point(make: Callable[[], Scenario]) -> None:
    assert every_crash_point(make(), SEEDS, stride=STRIDE) > 8


MUTATIONS: dict[str, Scenario] = {
    "an append without a sync": appends(Undurable),
    "a state without a sync": appends(UndurableStates),
    "nothing that was read is synced": reports(SettlesNothing),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_caught(mutation: str, named_seeds: NamedSeeds) -> None:
    def breaks(seed: int) -> str | None:
        try:
            every_crash_point(MUTATIONS[mutation], [seed])
        except (AssertionError, CheckpointdError) as error:
            return str(error) or "an assertion"
        return None

    named_seeds.caught(f"log: {mutation}", breaks, range(SEEDS_MAX))


@pytest.mark.nightly
@pytest.mark.parametrize("make", [appends, reports, rebuilds])
def test_every_crash_point_of_many_runs(make: Callable[[], Scenario]) -> None:
    every_crash_point(make(), range(100, 140))
