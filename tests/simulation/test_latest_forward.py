"""What the ledger says of a `latest` that goes back: only off a tag that was committed again meanwhile, and not for long."""

from __future__ import annotations

import pytest

from checkpointd.layout.keys import LATEST
from checkpointd.pipeline.root import catalog, latest
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from checkpointd.testing.simdisk import Effect, SimDisk
from checkpointd.testing.simjob import ROOT
from checkpointd.testing.simledger import InvariantError, Ledger, Order
from tests.builders import begin_epoch, save_checkpoint

AGAIN, LATE, OTHER = "again", "late", "other"
LATE_ORDER = (2, 0)


class Overtaken:
    """One process moves `latest` to LATE. Just before its put, others commit, and leave `latest` at the tag that it replaces.

    Made inside the simulation.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.disk = SimDisk(root="/root")
        self.ledger = Ledger(self.disk, ROOT)
        self.disk.after = self._after
        self.view = self.disk.process("mover")
        self.store = PosixStore(ROOT, self.view, writer="mover", is_alive=lambda one: one in self.disk.alive())

    def _after(self, effect: Effect, done: bool) -> None:
        if done:
            self.ledger.watch(effect)

    async def run(self) -> Order:
        """Returns the order of AGAIN's second commit."""
        return await self.view.process.spawn(self._run())

    async def _run(self) -> Order:
        await save_checkpoint(self.store, tag=AGAIN, epoch=await begin_epoch(self.store))
        await save_checkpoint(self.store, tag=LATE, epoch=await begin_epoch(self.store), save_latest=False)
        put_if_match = self.store.put_if_match

        async def others_first(key: str, expected: bytes | None, data: bytes) -> bool:
            self.patch.setattr(self.store, "put_if_match", put_if_match)
            for tag in (OTHER, AGAIN):
                await save_checkpoint(self.store, tag=tag, epoch=await begin_epoch(self.store))
            return await put_if_match(key, expected, data)

        self.patch.setattr(self.store, "put_if_match", others_first)
        await latest.move_latest(self.store, LATE, (await catalog.find(self.store, LATE)).outcome.order)
        return (await catalog.find(self.store, AGAIN)).outcome.order


def test_who_moves_latest_off_a_tag_that_was_committed_again_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    went_back = []
    was_committed_again = Ledger._was_committed_again

    def noted(ledger: Ledger, order: Order, than: Order) -> bool:
        went_back.append((order, than))
        return was_committed_again(ledger, order, than)

    async def main() -> None:
        overtaken = Overtaken(monkeypatch)
        monkeypatch.setattr(Ledger, "_was_committed_again", noted)
        again = await overtaken.run()
        assert went_back == [(again, LATE_ORDER)]
        overtaken.ledger.quiet()
        overtaken.ledger.latest_stands(again, "the second save of the tag")
        overtaken.ledger.latest_stands(LATE_ORDER, "the mover")

    simloop.run(0, main())


def test_a_mover_that_does_not_give_latest_back_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leaves_it(store: Store, replaced: bytes | None, order: Order) -> bool:
        return False

    async def main() -> None:
        overtaken = Overtaken(monkeypatch)
        monkeypatch.setattr(latest, "_give_back", leaves_it)
        again = await overtaken.run()
        overtaken.ledger.latest_stands(again, "the second save of the tag, which may report before the mover")
        with pytest.raises(InvariantError, match="latest-forward"):
            overtaken.ledger.latest_stands(LATE_ORDER, "the mover")
        with pytest.raises(InvariantError, match="latest-forward"):
            overtaken.ledger.quiet()
        overtaken.disk.kill("mover")
        overtaken.ledger.quiet()  # the dead owe nothing: the next start moves `latest` on

    simloop.run(0, main())


def test_latest_does_not_go_back_off_a_tag_that_was_committed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def go_back(store: Store) -> None:
        await save_checkpoint(store, tag=LATE, epoch=await begin_epoch(store), save_latest=False)
        await save_checkpoint(store, tag=OTHER, epoch=await begin_epoch(store))
        with pytest.raises(InvariantError, match="latest-forward"):
            await store.put_if_match(LATEST, f"{OTHER}\n".encode(), f"{LATE}\n".encode())

    async def main() -> None:
        overtaken = Overtaken(monkeypatch)
        await overtaken.view.process.spawn(go_back(overtaken.store))

    simloop.run(0, main())
