"""Processes that append to one log at once, while calls of the store fail, lose their replies, or have their effect late.

Every record is in the log exactly once, all come to the same state, and nothing hangs (LOG-1 to LOG-4 and LOG-6).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import pytest

from checkpointd.commit import log_access
from checkpointd.commit.log import check_all, following
from checkpointd.errors import StoreError
from checkpointd.layout.log_records import LogState, Record, decode_entry, entry_key
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from checkpointd.testing.simbucket import LATE_S_MAX, Fate, SimBucket
from checkpointd.testing.simdisk import FarDisk, SimDisk
from tests.logs import Unruly, announce, begin, name, names_in, objects_of

T = TypeVar("T")

PROCESSES, CALLERS, CALLS = 3, 2, 3
GIVEN_UP = 90
"""The record of the caller that gives up: it may be there or not."""
CALLBACKS_MAX = 60_000
"""A race needs a tenth of this. One that needs more hangs."""
WEATHER: Mapping[Fate, float] = {
    "lost": 0.03,
    "unanswered": 0.05,
    "late": 0.04,
    "repeated": 0.05,
    "overtaken": 0.05,
    "slow down": 0.05,
}
Work = Callable[[Store], Coroutine[Any, Any, T]]


class InMemory:
    """Where a log lies, for several processes."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"places {seed}")
        self.memory = MemoryStore()
        self.stores: list[Unruly] = []

    def spawn(self, name: str, work: Work[T]) -> asyncio.Task[T]:
        """Run `work` in a process of its own."""
        self.stores.append(Unruly(self.memory, self.rng, 0.25))
        return asyncio.ensure_future(work(self.stores[-1]))

    async def settle(self) -> None:
        """Wait until all late effects have come, and let nothing fail from then on."""
        await asyncio.gather(*(late for store in self.stores for late in store.late))
        self.spawn = lambda _, work: asyncio.ensure_future(work(self.memory))  # type: ignore[method-assign, assignment]


class Overwriting(InMemory):
    """A planted mistake: a put takes the place of what is there."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.memory.put_if_absent = self._put  # type: ignore[method-assign]

    async def _put(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        await self.memory.put(key, data)
        return True


class InBucket(InMemory):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.bucket = SimBucket(weather=WEATHER, page=7)

    def spawn(self, name: str, work: Work[T]) -> asyncio.Task[T]:
        client = self.bucket.process(name)
        return client.process.spawn(work(ObjectStore(client)))

    async def settle(self) -> None:
        await asyncio.sleep(2 * LATE_S_MAX)
        self.bucket.weather = {}


class OnDisk(InMemory):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.disk = SimDisk()

    def spawn(self, name: str, work: Work[T]) -> asyncio.Task[T]:
        disk = self.disk.process(name, FarDisk)
        return disk.process.spawn(work(PosixStore("/root/run", disk, writer=name, is_alive=lambda _: True)))

    async def settle(self) -> None:
        """Nothing comes late."""


async def until_done(log: RootLog, rng: random.Random, *records: Record) -> str:
    """Why the log refuses `records`, if it does: ask again after each failure."""
    while True:
        try:
            return await log.add(*records)
        except StoreError:
            await asyncio.sleep(rng.random())


async def work(log: RootLog, rng: random.Random, first: int) -> None:
    """Several callers, of which one gives up, and now and then one asks for what is refused."""

    async def calls(at: int) -> None:
        for number in range(first + CALLS * at, first + CALLS * (at + 1)):
            assert await until_done(log, rng, announce(number)) == ""
            assert name(number) in log.state.attempts
            if rng.random() < 0.2:
                assert "start 1" in await until_done(log, rng, announce(number, start=7))
            await log.compact()

    async def gives_up() -> None:
        with suppress(TimeoutError, StoreError):
            async with asyncio.timeout(rng.random()):
                await log.add(announce(first + GIVEN_UP))

    assert await until_done(log, rng, begin(nonce="0" * 32)) == ""
    await asyncio.gather(gives_up(), *map(calls, range(CALLERS)))


def race(seed: int, place: type[InMemory]) -> int:
    """Returns how many entries there are."""

    async def main() -> int:
        places, logs = place(seed), list[RootLog]()

        async def process(store: Store) -> None:
            logs.append(RootLog(store))
            await work(logs[-1], places.rng, 100 * len(logs))

        await asyncio.gather(*(places.spawn(f"process {at}", process) for at in range(PROCESSES)))
        await places.settle()
        return await places.spawn("reader", lambda store: check(RootLog(store), logs))

    return simloop.run(seed, main(), callbacks_max=CALLBACKS_MAX)


async def check(reader: RootLog, logs: list[RootLog]) -> int:
    state = await reader.look()
    assert reader.fault == "", reader.fault
    firsts = [100 * (at + 1) for at in range(len(logs))]
    wanted = {name(first + number) for first in firsts for number in range(CALLERS * CALLS)}
    assert wanted <= state.attempts.keys() <= wanted | {name(first + GIVEN_UP) for first in firsts}
    for log in logs:
        goes_on = RootLog(reader.store)
        await goes_on.goes_on_from(log.state)
        assert (await goes_on.look(), goes_on.fault) == (state, "")
    if not await names_in(reader.store, ".state"):
        known, objects = LogState(), await objects_of(reader.store)
        for number in range(1, state.number + 1):
            entry = decode_entry(objects[entry_key(number)], number)
            assert check_all(known, entry.records) == ""
            known = following(known, [entry])
        assert known == state
    return state.number


def test_racing_processes_where_calls_fail() -> None:
    """Callers that meet share entries, so there are fewer than records."""
    entries = [race(seed, InMemory) for seed in range(40)]
    assert min(entries) < PROCESSES * CALLERS * CALLS + 1


def test_racing_processes_in_a_bucket() -> None:
    for seed in range(8):
        race(seed, InBucket)


def test_racing_processes_on_a_disk() -> None:
    for seed in range(10):
        race(seed, OnDisk)


@pytest.mark.parametrize("place", [InMemory, InBucket, OnDisk])
def test_racing_processes_that_compact(place: type[InMemory], monkeypatch: pytest.MonkeyPatch) -> None:
    """A state after each third entry, of which two stay."""
    monkeypatch.setattr(log_access, "STATE_EVERY", 3)
    monkeypatch.setattr(log_access, "STATES_KEPT", 2)
    for seed in range(100, 120 if place is InMemory else 106):
        race(seed, place)


@pytest.mark.nightly
@pytest.mark.parametrize("place", [InMemory, InBucket, OnDisk])
@pytest.mark.parametrize("compacts", [True, False])
def test_many_races(place: type[InMemory], compacts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if compacts:
        monkeypatch.setattr(log_access, "STATE_EVERY", 3)
        monkeypatch.setattr(log_access, "STATES_KEPT", 2)
    for seed in range(1000, 3000 if place is InMemory else 1300):
        race(seed, place)


def test_a_put_that_takes_the_place_of_another_is_found() -> None:
    for seed in range(10):
        with suppress(AssertionError):
            race(seed, Overwriting)
            continue
        return
    raise AssertionError("no race has found it")
