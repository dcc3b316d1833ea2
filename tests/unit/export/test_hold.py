"""One process holds a place of exports; another takes it once that one has ended, or renews its lease no more."""

from __future__ import annotations

import asyncio

import pytest

from checkpointd.errors import StoreError
from checkpointd.export.hold import HOLD, ExportHold
from checkpointd.pipeline.root.leases import Sight
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.writers import Life
from checkpointd.testing import simloop

LENGTH_S = 30.0


def sight(name: str, lives: dict[str, Life]) -> Sight:
    return Sight(process=name, life=lambda other: lives.get(other, "unknown"), length_s=LENGTH_S)


class Failing(PassingStore):
    """Fails replacements as often as told: before, or after their effect."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.before = self.after = 0

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        if self.before:
            self.before -= 1
            raise StoreError("away")
        done = await self._store.put_if_match(key, expected, data)
        if self.after:
            self.after -= 1
            raise StoreError("the answer is lost")
        return done


async def waited_for(hold: ExportHold) -> float:
    """The seconds until `hold` has taken the place, with a look every 5 s."""
    began = asyncio.get_running_loop().time()
    while not await hold.take():
        await asyncio.sleep(5)
    return asyncio.get_running_loop().time() - began


async def contend(lives: dict[str, Life]) -> None:
    store = MemoryStore("to")
    one, two = (ExportHold(store, "/root", sight(name, lives)) for name in ("one", "two"))
    assert await one.take()
    assert await one.take()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5 * LENGTH_S):  # it is renewed
            await waited_for(two)
    assert two.holder is not None
    assert two.holder.process == "one"
    await one.check()
    await one.release()
    assert await store.stat(HOLD) is None
    assert await waited_for(two) < 1
    await two.release()


def test_exporthold_1_one_process_holds_a_place() -> None:
    simloop.run(0, contend({}))


@pytest.mark.parametrize(("life", "seconds"), [("ended", 0.0), ("unknown", LENGTH_S), ("running", 4 * LENGTH_S)])
def test_exporthold_1_another_takes_over_from_one_that_renews_no_more(life: Life, seconds: float) -> None:
    async def take_over() -> None:
        store = MemoryStore("to")
        one, two = (ExportHold(store, "/root", sight(name, {"one": life})) for name in ("one", "two"))
        assert await one.take()
        assert one._renewing is not None
        one._renewing.cancel()  # it was killed, or hangs
        took = await waited_for(two)
        assert seconds <= took <= seconds + 10
        with pytest.raises(StoreError, match="was not renewed for 30 s" if took else "lost"):
            await (one.check() if took else renewed(one))
        await two.check()
        await one.release()
        assert await store.stat(HOLD) is not None  # that of the second
        await two.release()

    simloop.run(0, take_over())


async def renewed(hold: ExportHold) -> None:
    """A paused process goes on: its next renewal finds the lease of another one."""
    await hold._renew()
    await hold.check()


def test_exporthold_2_a_lease_that_cannot_be_renewed_does_not_count() -> None:
    async def fail() -> None:
        store = Failing(MemoryStore("to"))
        hold = ExportHold(store, "/root", sight("one", {}))
        assert await hold.take()
        store.before = 2
        await asyncio.sleep(LENGTH_S - 1)
        await hold.check()
        store.before = 10**6
        await asyncio.sleep(LENGTH_S + 1)
        with pytest.raises(StoreError, match="was not renewed for 30 s"):
            await hold.check()
        store.before = 0
        await asyncio.sleep(LENGTH_S)
        await hold.check()  # nobody has taken it
        await hold.release()

    simloop.run(0, fail())


@pytest.mark.parametrize("at_first", [True, False])
def test_a_renewal_whose_answer_is_lost_is_its_own(at_first: bool) -> None:
    async def lose() -> None:
        store = Failing(MemoryStore("to"))
        hold = ExportHold(store, "/root", sight("one", {}))
        if at_first:
            store.after = 1
            with pytest.raises(StoreError, match="the answer is lost"):
                await hold.take()
        assert await hold.take()
        store.after = 1
        await asyncio.sleep(3 * LENGTH_S)
        await hold.check()
        await hold.release()
        assert await store.stat(HOLD) is None

    simloop.run(0, lose())


def test_a_take_that_fails_after_its_answer_was_lost_is_tried_again() -> None:
    async def lose_and_fail() -> None:
        store = Failing(MemoryStore("to"))
        hold = ExportHold(store, "/root", sight("one", {}))
        store.after = 1
        with pytest.raises(StoreError, match="the answer is lost"):
            await hold.take()
        store.before = 1
        with pytest.raises(StoreError, match="away"):
            await hold.take()
        assert not hold.is_held
        assert await hold.take()
        await asyncio.sleep(3 * LENGTH_S)
        await hold.check()  # it is renewed
        await hold.release()

    simloop.run(0, lose_and_fail())
