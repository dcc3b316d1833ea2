"""The ranks hear from each other which saves lie in all spools, without a rank that waits for another one."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from checkpointd.commit.facts import Order
from checkpointd.commit.machine import Phase
from checkpointd.config import Ranks
from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd_client.ranks.board import StoreBoard
from checkpointd_client.saves import spooled_by_all
from checkpointd_client.saves.spooled_by_all import SpooledByAll

WORLD = 3


def info_of(n: int, rank: int, *, save_latest: bool = True) -> AttemptInfo:
    attempt = AttemptId(7, 0)
    return AttemptInfo(tag=f"t{n}", attempt=attempt, rank=rank, world_size=WORLD, step=n, n=n, save_latest=save_latest)


class Rank:
    """One rank of a start."""

    def __init__(self, store: HashStore, rank: int) -> None:
        self.rank, self.told = rank, list[Order]()
        self.board = StoreBoard(store, Ranks(rank=rank, world_size=WORLD))
        self.spooled = SpooledByAll(self.board, WORLD, self.told.append)

    async def entered(self, n: int, phase: Phase = Phase.SPOOLED, *, save_latest: bool = True) -> None:
        self.spooled.entered(info_of(n, self.rank, save_latest=save_latest), phase)
        await asyncio.gather(*self.spooled._tasks)

    async def hears(self) -> int | None:
        self.spooled.look()
        return await self.spooled.heard()


def ranks() -> list[Rank]:
    store = HashStore()
    return [Rank(store, rank) for rank in range(WORLD)]


def test_a_save_counts_once_all_ranks_have_it_and_each_hears_so_at_its_next_look() -> None:
    async def main() -> None:
        first, second, third = ranks()
        for rank in (first, second):
            for _ in range(3):  # a sidecar that comes back says it again
                await rank.entered(0)
            assert await rank.hears() is None
        await third.entered(0)
        assert third.told == [(7, 0)], "the last one knows at once"
        await first.entered(1)
        assert [await rank.hears() for rank in (first, second, third)] == [0, 0, 0]
        assert [rank.told for rank in (first, second, third)] == [[(7, 0)]] * 3

    asyncio.run(main())


def test_the_newest_that_all_have_counts_and_those_that_some_lack_do_not() -> None:
    async def main() -> None:
        first, second, third = ranks()
        for n in (0, 1, 2):
            await first.entered(n)
            await second.entered(n)
        await third.entered(1)
        assert await first.hears() == 1
        await third.entered(0)
        assert await second.hears() == 1

    asyncio.run(main())


def test_a_shard_that_went_straight_to_the_root_does_not_count() -> None:
    """Its vote may be lost, and a start goes on with no save of which rank 0 has nothing in its spool."""

    async def main() -> None:
        first, second, third = ranks()
        for rank in (first, second, third):
            await rank.entered(0)
        for rank in (second, third):
            await rank.entered(1)
        await first.entered(1, Phase.PREPARED)
        assert [await rank.hears() for rank in (first, second, third)] == [0, 0, 0]

    asyncio.run(main())


def test_a_shard_counts_although_the_word_of_it_was_lost_with_the_connection() -> None:
    async def main() -> None:
        first, second, third = ranks()
        for rank in (first, second):
            await rank.entered(0)
        await third.entered(0, Phase.UPLOADING)
        assert await first.hears() == 0

    asyncio.run(main())


def test_a_save_that_moves_no_latest_replaces_none() -> None:
    async def main() -> None:
        for rank in (found := ranks()):
            await rank.entered(0, save_latest=False)
        assert await found[0].hears() is None

    asyncio.run(main())


def test_a_board_that_does_not_answer_leaves_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        first, _, _ = ranks()

        def refuse(*_: object) -> int:
            raise CheckpointdError("torch.distributed's store does not answer")

        monkeypatch.setattr(StoreBoard, "count", refuse)
        await first.entered(0)
        assert await first.hears() is None

    asyncio.run(main())


def test_a_board_that_hangs_takes_no_thread_of_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store whose host is gone without a word answers no call, and ends none."""
    goes_on = threading.Event()
    monkeypatch.setattr(StoreBoard, "count", lambda *_: goes_on.wait())
    monkeypatch.setattr(spooled_by_all, "HEAR_S", 0.0)

    async def main() -> None:
        first, _, _ = ranks()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(2))
        before = set(threading.enumerate())
        for n in range(4):
            first.spooled.entered(info_of(n, 0), Phase.SPOOLED)
            assert await first.hears() is None
        work = loop.run_in_executor(None, lambda: "a chunk is encoded")
        try:
            assert await asyncio.wait_for(work, 60.0) == "a chunk is encoded"
            hanging = [one for one in set(threading.enumerate()) - before if one.name == "checkpointd-board"]
            assert [one.daemon for one in hanging] == [True], "nor does the process wait for it at its end"
        finally:
            goes_on.set()
            await asyncio.gather(*first.spooled._tasks)

    asyncio.run(main())


def test_numbers_do_not_pile_up_on_the_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_by_all, "COUNTED_MAX", 2)

    async def main() -> None:
        store = HashStore()
        found = [Rank(store, rank) for rank in range(WORLD)]
        for n in range(5):
            for rank in reversed(found):
                await rank.entered(n)
        assert store.num_keys() == 2

    asyncio.run(main())


def test_numbers_do_not_pile_up_if_rank_0_skips_saves_or_has_no_spool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spooled_by_all, "COUNTED_MAX", 2)

    async def main() -> None:
        store = HashStore()
        found = [Rank(store, rank) for rank in range(WORLD)]
        for n in range(5):
            for rank in found[1:]:
                await rank.entered(n)
        assert store.num_keys() == 2

    asyncio.run(main())
