"""LEASE-2 to LEASE-7 of pipeline/root/leases.py, in virtual time: who is waited for, for how long, and who is left alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from checkpointd.errors import NotFoundError, RootInUseError, StoreError
from checkpointd.layout.keys import LOG_ROOT, attempt_lease_key, job_lease_key
from checkpointd.layout.log_records import BeginRecord, entry_key
from checkpointd.layout.manifest import Lease, decode, encode
from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.root import leases, starts
from checkpointd.pipeline.root.leases import Beginner, HeldLease
from checkpointd.store.memory import MemoryStore
from checkpointd.store.writers import Life
from tests.builders import leave_in_doubt
from tests.lease_builders import LENGTH_S, PREFIX, SINCE, now, put_lease, sight, simulated


def beginner(process: str, job: str = "", *, life: Life = "unknown", take_over: bool = False) -> Beginner:
    return Beginner(world_size=1, job=job, take_over=take_over, instead="Go elsewhere.", sight=sight(process, life))


async def begin(store: MemoryStore, who: Beginner) -> tuple[BeginRecord, HeldLease]:
    taken = await starting.begin(store, who)
    return taken.start, taken.lease


async def timed(work: Awaitable[object]) -> float:
    """How long `work` took, in virtual seconds."""
    began = now()
    await work
    return now() - began


async def stop_renewing(held: HeldLease) -> None:
    """What is left when its process is killed."""
    held._over.set()
    assert held._task is not None
    await held._task


async def attempts_at_work(store: MemoryStore, life: Life = "unknown") -> tuple[str, ...]:
    return await leases.attempts_at_work(store, sight("here", life))


class Stale(MemoryStore):
    """After a while `key` cannot be opened a few times, although it is listed."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key, self.stale = key, 0

    async def get(self, key: str, *, size_max: int = 1 << 20) -> bytes:
        if key == self._key and self.stale:
            self.stale -= 1
            raise NotFoundError("a stale directory entry")
        return await super().get(key, size_max=size_max)


class Unreadable(MemoryStore):
    """From its second read on, `key` cannot be read."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key, self.reads = key, 0

    async def get(self, key: str, *, size_max: int = 1 << 20) -> bytes:
        self.reads += key == self._key
        if key == self._key and self.reads > 1:
            raise StoreError("the server has not answered in time")
        return await super().get(key, size_max=size_max)


# --- jobs ---------------------------------------------------------------------------------------------------------------


def test_lease_3_the_lease_is_there_before_the_start() -> None:
    put: list[str] = []

    class Watched(MemoryStore):
        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            put.append(key)
            return await super().put_if_absent(key, data, durable=durable)

    async def work() -> None:
        store = Watched()
        start, held = await begin(store, beginner("a", "train"))
        assert put == [job_lease_key(1), LOG_ROOT, entry_key(1)]
        lease = decode(await store.get(held.key), Lease, held.key)
        assert (lease.process, lease.job, lease.length_s) == ("a", "train", LENGTH_S)
        assert (start.process, start.job) == ("a", "train")
        await held.release()

    simulated(work)


def test_lease_5_nobody_begins_beside_a_job_of_which_it_cannot_tell_whether_it_lives() -> None:
    async def work() -> None:
        store = Unreadable(job_lease_key(1))
        await begin(store, beginner("a", "train"))
        store.reads = 0
        with pytest.raises(StoreError, match="has not answered in time"):
            await begin(store, beginner("b", "other"))
        assert await starts.newest(store) == 1
        await begin(store, beginner("b", "other", take_over=True))

    simulated(work)


@pytest.mark.parametrize("life", ["unknown", "running"])
@pytest.mark.parametrize("names", [("train", "eval"), ("train", ""), ("", "")])
def test_lease_5_a_living_job_of_another_name_is_left_alone(life: Life, names: tuple[str, str]) -> None:
    async def work() -> None:
        store = MemoryStore()
        _, held = await begin(store, beginner("a", names[0]))
        began = now()
        with pytest.raises(RootInUseError, match=r"memory is in use: process \d+ on \S+ runs .* since .* Go elsewhere\."):
            await begin(store, beginner("b", names[1], life=life))
        assert now() - began <= LENGTH_S
        assert await starts.newest(store) == 1
        assert [entry.name for entry in await store.list(".checkpointd/leases")] == ["00000001"]
        await held.release()

    simulated(work)


def test_lease_5_the_same_job_and_who_is_told_to_take_over_wait_for_nobody() -> None:
    async def work() -> None:
        store = MemoryStore()
        _, first = await begin(store, beginner("a", "train"))
        assert await timed(begin(store, beginner("b", "train"))) == 0
        assert await timed(begin(store, beginner("c", "eval", take_over=True))) == 0
        assert await starts.newest(store) == 3
        await asyncio.sleep(2 * LENGTH_S)
        # Those that were taken over from say nothing any more.
        assert [entry.name for entry in await store.list(".checkpointd/leases")] == ["00000003"]
        await first.release()

    simulated(work)


def test_lease_2_a_process_that_has_ended_here_is_not_waited_for() -> None:
    async def work() -> None:
        store = MemoryStore()
        _, held = await begin(store, beginner("a"))
        await stop_renewing(held)
        assert await timed(begin(store, beginner("b", life="ended"))) == 0

    simulated(work)


def test_lease_5_who_comes_while_a_start_looks_around_is_found() -> None:
    """The other's lease appears after the last look at the leases, and before the own one is put."""

    class Late(MemoryStore):
        looks = 0

        async def list(self, prefix: str) -> list[Any]:
            found = await super().list(prefix)
            if prefix == ".checkpointd/leases":
                self.looks += 1
                if self.looks == 2:
                    await begin(self, beginner("b", "two", take_over=True))
            return found

    async def work() -> None:
        store = Late()
        with pytest.raises(RootInUseError, match="runs job 'two'"):
            await begin(store, beginner("a", "one"))
        assert [(await starts.read(store, number)).job for number in range(1, await starts.newest(store) + 1)] == ["two"]

    simulated(work)


def test_lease_6_a_lease_that_is_listed_and_cannot_be_opened_has_not_gone() -> None:
    async def work() -> None:
        store = Stale(job_lease_key(1))
        _, held = await begin(store, beginner("first"))
        store.stale = 3
        with pytest.raises(RootInUseError):
            await begin(store, beginner("second"))
        await held.release()

    simulated(work)


@pytest.mark.parametrize("data", [b"", b"not a lease", encode(Lease(process="x", count=1, length_s=1e9, writer=SINCE))])
def test_lease_4_a_lease_that_cannot_be_understood_keeps_nobody_for_ever(data: bytes) -> None:
    async def work() -> None:
        store = MemoryStore()
        await store.put(job_lease_key(1), data)
        assert await timed(begin(store, beginner("a"))) <= leases.LENGTH_S

    simulated(work)


def test_lease_4_a_holder_that_nobody_could_hear_is_given_its_time_again() -> None:
    class Failing(MemoryStore):
        fails = False

        async def get(self, key: str, **options: Any) -> bytes:
            if self.fails and key == job_lease_key(1):
                raise StoreError("stale file handle")
            return await super().get(key, **options)

    async def work() -> None:
        store = Failing()
        await put_lease(store, job_lease_key(1))
        beginning = asyncio.create_task(begin(store, beginner("b", "other")))
        for store.fails, seconds in ((False, 5), (True, LENGTH_S - 6), (False, 6)):
            await asyncio.sleep(seconds)
        await put_lease(store, job_lease_key(1), 2)
        with pytest.raises(RootInUseError):
            await beginning

    simulated(work)


# --- renewing -----------------------------------------------------------------------------------------------------------


def test_lease_7_a_renewal_that_fails_is_said_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(MemoryStore):
        fails = False

        async def put(self, key: str, data: bytes) -> None:
            if self.fails:
                raise StoreError("the disk is gone")
            await super().put(key, data)

    async def work() -> None:
        store = Failing()
        _, held = await begin(store, beginner("a"))
        store.fails = True
        await asyncio.sleep(LENGTH_S)
        assert caplog.text.count("cannot be renewed: the disk is gone; trying again") == 1
        store.fails = False
        before = await store.get(held.key)
        await asyncio.sleep(LENGTH_S)
        assert await store.get(held.key) != before
        await held.release()
        assert await store.stat(held.key) is None

    simulated(work)


def test_lease_7_a_lease_that_somebody_removed_is_put_again_while_its_start_is_the_newest() -> None:
    async def work() -> None:
        store = MemoryStore()
        _, held = await begin(store, beginner("a"))
        await store.delete(held.key)
        await asyncio.sleep(LENGTH_S)
        assert await store.stat(held.key) is not None
        await starts.take(store, 1)
        await store.delete(held.key)
        await asyncio.sleep(LENGTH_S)
        assert await store.stat(held.key) is None
        await held.release()

    simulated(work)


def test_lease_7_the_lease_of_another_root_in_its_place_stays() -> None:
    async def work() -> None:
        store, other = MemoryStore(), MemoryStore()
        _, held = await begin(store, beginner("a", "train"))
        await begin(other, beginner("b", "other"))
        for key in (LOG_ROOT, entry_key(1), job_lease_key(1)):
            await store.put(key, await other.get(key))
        theirs = await store.get(held.key)
        await asyncio.sleep(LENGTH_S)
        assert await store.get(held.key) == theirs
        await held.release()
        assert await store.get(held.key) == theirs

    simulated(work)


def test_lease_7_who_has_taken_an_attempt_over_keeps_its_lease() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        first, second = (leases.of_attempt(store, PREFIX, sight(name)) for name in ("a", "b"))
        for held in (first, second):
            held.keep()
            await asyncio.sleep(1.0)
            first.lapse()
        await first.release()
        assert await store.stat(second.key) is not None
        await second.release()
        assert await store.stat(second.key) is None

    simulated(work)


def test_a_lease_that_is_being_put_does_not_come_back_after_its_release() -> None:
    class Slow(MemoryStore):
        async def put(self, key: str, data: bytes) -> None:
            await asyncio.sleep(1.0)
            await super().put(key, data)

    async def work() -> None:
        store = Slow()
        held = leases.of_attempt(store, PREFIX, sight("a"))
        held.keep()
        await asyncio.sleep(0.5)
        await held.release()
        held.keep()
        await asyncio.sleep(LENGTH_S)
        assert await store.stat(held.key) is None

    simulated(work)


# --- attempts -----------------------------------------------------------------------------------------------------------


def test_what_a_daemon_announces_while_a_start_waits_survives_without_another_wait() -> None:
    """Nothing but its lease shows it (found by simulation, seed 1108600)."""
    another = "global_step1/00000001-1"

    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        await put_lease(store, attempt_lease_key(PREFIX))  # its holder is dead
        looking = asyncio.create_task(begin(store, beginner("a")))
        await asyncio.sleep(LENGTH_S / 2)
        await put_lease(store, attempt_lease_key(another))
        began = now()
        start, held = await looking
        assert start.spared == (another,)
        assert now() - began == pytest.approx(LENGTH_S / 2)
        await held.release()

    simulated(work)


def test_a_process_of_this_machine_that_works_at_an_attempt_is_believed_at_once() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        await put_lease(store, attempt_lease_key(PREFIX))
        began = now()
        assert await attempts_at_work(store, "running") == (PREFIX,)
        assert await attempts_at_work(store, "ended") == ()
        assert now() == began

    simulated(work)


def test_what_the_own_daemon_works_at_is_not_watched() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        await put_lease(store, attempt_lease_key(PREFIX))
        began = now()
        start, held = await begin(store, replace(beginner("a"), surviving=(PREFIX,)))
        assert (start.spared, now()) == ((PREFIX,), began)
        await held.release()

    simulated(work)


def test_an_attempt_that_is_decided_is_nobodys_work() -> None:
    async def work() -> None:
        store = MemoryStore()
        await leave_in_doubt(store, voting=(0,))
        await put_lease(store, attempt_lease_key(PREFIX))
        await starts.take(store, 1)
        assert await timed(attempts_at_work(store, "running")) == 0
        assert await attempts_at_work(store, "running") == ()

    simulated(work)


def test_a_renewal_changes_the_count_and_nothing_else() -> None:
    async def work() -> None:
        store = MemoryStore()
        _, held = await begin(store, beginner("a", "train"))
        first = decode(await store.get(held.key), Lease, held.key)
        await asyncio.sleep(LENGTH_S)
        later = decode(await store.get(held.key), Lease, held.key)
        assert later.count > first.count
        assert msgspec.structs.replace(later, count=first.count) == first
        await held.release()

    simulated(work)
