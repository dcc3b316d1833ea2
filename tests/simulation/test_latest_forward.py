"""What the ledger says of a `latest` that goes back: only off a tag that was committed again just then, and not for long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from checkpointd.commit.facts import Order
from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.root.latest import _Mover, move_latest
from checkpointd.pipeline.root.marks import condemn
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from checkpointd.testing.job.simlatest import RACE_S
from checkpointd.testing.job.simledger import InvariantError, Ledger
from checkpointd.testing.job.simroot import ROOT, DiskRoot
from checkpointd.testing.simdisk import SimDisk
from checkpointd.testing.simstorage import Effect
from tests.builders import begin_start, save_checkpoint

AGAIN, LATE, OTHER = "again", "late", "other"
BACK = (2, 0)
"""The order of the commit of LATE."""
ELSEWHERE = {"already there": (AGAIN,), "moved there again": (OTHER, AGAIN)}


class Race:
    """A mover takes `latest` from AGAIN to LATE. Just before its put, AGAIN is committed again; `meanwhile` is awaited between
    its put and its look at AGAIN. Made inside the simulation.
    """

    def __init__(self, patch: pytest.MonkeyPatch, saved: tuple[str, ...] = (OTHER, AGAIN), late_s: float = 0.0) -> None:
        self.disk = SimDisk(root="/root")
        self.ledger = Ledger(DiskRoot(self.disk, lambda one: one in self.disk.alive()))
        self.disk.after = self._after
        self.view = self.disk.process("mover")
        self.store = PosixStore(ROOT, self.view, writer="mover", is_alive=lambda one: one in self.disk.alive())
        self.meanwhile: Callable[[], Awaitable[Any]] | None = None
        self._patch, self._saved, self._late_s = patch, saved, late_s

    def _after(self, effect: Effect, done: bool) -> None:
        if done:
            self.ledger.watch(effect)

    async def run(self) -> None:
        await self.view.process.spawn(self._run())

    async def _run(self) -> None:
        store, patch = self.store, self._patch
        await save_checkpoint(store, tag=AGAIN, start=await begin_start(store))
        await save_checkpoint(store, tag=LATE, start=await begin_start(store), save_latest=False)
        put, give_back = store.put_if_match, _Mover._give_back

        async def others_first(key: str, expected: bytes | None, data: bytes) -> bool:
            patch.setattr(store, "put_if_match", put)
            for tag in self._saved:
                await save_checkpoint(store, tag=tag, start=await begin_start(store))
            await asyncio.sleep(self._late_s)
            patch.setattr(_Mover, "_give_back", later)
            return await put(key, expected, data)

        async def later(mover: _Mover) -> bool:
            patch.setattr(_Mover, "_give_back", give_back)
            if self.meanwhile is not None:
                await self.meanwhile()
            return await give_back(mover)

        patch.setattr(store, "put_if_match", others_first)
        await move_latest(store, LATE, BACK)

    def reports(self, order: Order, who: str = "mover") -> None:
        self.ledger.latest_stands(order, who)


def simulated(main: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        await main()

    simloop.run(0, run())


def never_given_back(patch: pytest.MonkeyPatch) -> None:
    async def leave(*_: object) -> bool:
        return False

    patch.setattr(_Mover, "_give_back", leave)


@pytest.fixture(params=ELSEWHERE)
def saved(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What is committed just before the put: `latest` is at AGAIN all the time, or comes back to it."""
    return ELSEWHERE[request.param]


def test_latest_may_go_back_off_a_tag_that_is_committed_again_until_it_is_given_back(
    saved: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        race, again = Race(monkeypatch, saved), (len(saved) + 2, 0)

        async def others_report() -> None:
            assert [debt.owed for debt in race.ledger.latest.debts] == [again]
            race.reports(again, "the second save of the tag")
            race.reports(BACK, "another process that leads LATE")

        race.meanwhile = others_report
        await race.run()
        assert race.ledger.latest.debts == []
        race.ledger.at_rest()
        race.reports(again)

    simulated(main)


def test_a_mover_that_does_not_give_latest_back_is_caught_at_rest(
    saved: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        never_given_back(monkeypatch)
        race = Race(monkeypatch, saved)
        await race.run()
        with pytest.raises(InvariantError, match="latest-forward"):
            race.ledger.at_rest()
        race.disk.kill("mover")
        race.ledger.at_rest()  # the dead owe nothing: the next start moves `latest` on

    simulated(main)


def test_a_mover_that_reports_before_it_gives_latest_back_is_caught(
    saved: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        race = Race(monkeypatch, saved)

        async def too_early() -> None:
            with pytest.raises(InvariantError, match="did not give it back"):
                race.reports(BACK, "mover")
            race.reports((1, 0), "mover")  # of another save

        race.meanwhile = too_early
        await race.run()
        race.reports(BACK, "mover")

    simulated(main)


def test_what_was_removed_is_owed_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        race = Race(monkeypatch)
        race.meanwhile = lambda: condemn(race.store, f"{AGAIN}/00000004-0", "the test", ())
        await race.run()
        race.ledger.at_rest()
        race.reports(BACK)

    simulated(main)


def test_power_cuts_before_latest_is_given_back_show_it_where_it_went_back_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        race, reached = Race(monkeypatch), asyncio.Event()

        async def hang() -> None:
            race.reports((4, 0), "the second save of the tag")
            reached.set()
            await asyncio.sleep(1000)

        race.meanwhile = hang
        mover = asyncio.ensure_future(race.run())
        await reached.wait()
        for _ in range(2):
            race.disk.power_cut()
            race.ledger.after_power_cut()
        view = race.disk.process("next")
        store = PosixStore(ROOT, view, writer="next", is_alive=lambda _: False)
        await view.process.spawn(store.delete(LATEST))
        with pytest.raises(InvariantError, match="latest-forward"):
            race.ledger.after_power_cut()  # further back than it went
        mover.cancel()

    simulated(main)


def test_latest_does_not_go_back_off_what_was_committed_again_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        with pytest.raises(InvariantError, match="latest-forward"):
            await Race(monkeypatch, late_s=RACE_S).run()

    simulated(main)


def test_latest_does_not_go_back_off_a_tag_that_was_committed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go_back(store: PosixStore) -> None:
        await save_checkpoint(store, tag=LATE, start=await begin_start(store), save_latest=False)
        await save_checkpoint(store, tag=OTHER, start=await begin_start(store))
        with pytest.raises(InvariantError, match="latest-forward"):
            await store.put_if_match(LATEST, f"{OTHER}\n".encode(), f"{LATE}\n".encode())

    async def main() -> None:
        race = Race(monkeypatch)
        await race.view.process.spawn(go_back(race.store))

    simulated(main)
