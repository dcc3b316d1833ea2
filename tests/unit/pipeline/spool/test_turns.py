"""Turns at uploading: the newest first, and all ranks the same attempt (TURN-1, TURN-3)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, field
from datetime import datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from checkpointd.config import SpoolConfig
from checkpointd.pipeline.spool import turns as turns_module
from checkpointd.pipeline.spool.shards import SpooledShard
from checkpointd.pipeline.spool.turns import HOLD_S, LED_S, Pacing, Turns
from checkpointd.testing import simloop

RANKS = 3


class Stub(SimpleNamespace):
    """What turns look at in a shard."""

    __hash__ = object.__hash__


def pacing() -> Pacing:
    return Pacing(SpoolConfig(directory="/nvme"), lambda: datetime(2026, 1, 1))


def shard(number: int, world_size: int = RANKS) -> SpooledShard:
    vote = SimpleNamespace(tag=f"t{number}", world_size=world_size, save_latest=True)
    made = Stub(
        prefix=f"t{number}/a",
        record=SimpleNamespace(order=(1, number), vote=vote),
        is_superseded=False,
        superseded_by="",
        must_stay=False,
    )
    return cast(SpooledShard, made)


def run(main: Coroutine[Any, Any, None]) -> None:
    simloop.run(1, main)


@dataclass
class Job:
    """Ranks that get a shard of each save and upload them at different speeds, and what they have announced and committed."""

    upload_s: tuple[float, ...]
    turns: list[Turns] = field(init=False)
    announced: list[str] = field(default_factory=list)
    votes: dict[str, set[int]] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)
    shards: dict[tuple[int, int], SpooledShard] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.turns = [Turns(pacing(), keep_all=True) for _ in self.upload_s]

    async def led(self, prefixes: Collection[str]) -> Collection[str]:
        return [prefix for prefix in self.announced if prefix in prefixes and prefix not in self.committed]

    async def upload(self, rank: int, number: int) -> None:
        one = self.shards[rank, number] = shard(number, len(self.upload_s))
        self.turns[rank].add(one)
        await self.turns[rank].taken(one, self.led if rank else None)
        if rank == 0:
            self.announced.append(one.prefix)
        await asyncio.sleep(self.upload_s[rank])
        voted = self.votes.setdefault(one.prefix, set())
        voted.add(rank)
        self.turns[rank].given_back(one, leads=rank == 0)
        if len(voted) == len(self.upload_s):
            self.committed.append(one.prefix)
            for other, turns in enumerate(self.turns):
                turns.ended(self.shards[other, number])


def test_turn_3_saves_that_come_faster_than_uploads_commit_all_the_same() -> None:
    async def main() -> None:
        job = Job(upload_s=(1.0, 1.7, 2.3))
        saves = []
        for number in range(200):
            saves += [asyncio.ensure_future(job.upload(rank, number)) for rank in range(3)]
            await asyncio.sleep(0.2)
        committed = len(job.committed)
        assert committed >= 200 * 0.2 / (2.3 + 1.5)
        numbers = [int(prefix[1:].partition("/")[0]) for prefix in job.committed]
        assert numbers == sorted(numbers), "each is newer than the one before, while new ones come"
        assert max(numbers) > 150
        await asyncio.gather(*saves)
        assert len(job.committed) == 200

    run(main())


def test_turn_1_the_newest_is_next() -> None:
    async def main() -> None:
        turns, order = Turns(pacing(), keep_all=True), list[str]()

        async def upload(one: SpooledShard) -> None:
            await turns.taken(one)
            order.append(one.prefix)
            await asyncio.sleep(1)
            turns.given_back(one)

        first = asyncio.ensure_future(upload(shard(1, 1)))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, *(upload(shard(number, 1)) for number in (2, 4, 3)))
        assert order == ["t1/a", "t4/a", "t3/a", "t2/a"]

    run(main())


def test_turn_3_a_rank_that_sees_no_announcement_goes_on_after_a_while() -> None:
    async def main() -> None:
        async def none(_: Collection[str]) -> Collection[str]:
            return ()

        turns, loop = Turns(pacing(), keep_all=True), asyncio.get_running_loop()
        began = loop.time()
        await turns.taken(shard(1), none)
        assert LED_S <= loop.time() - began <= LED_S + 2

    run(main())


def test_turn_3_the_coordinator_does_not_wait_for_ever() -> None:
    async def main() -> None:
        turns, loop = Turns(pacing(), keep_all=True), asyncio.get_running_loop()
        first, second = shard(1), shard(2)
        await turns.taken(first)
        turns.given_back(first, leads=True)
        began = loop.time()
        await turns.taken(second)
        assert HOLD_S <= loop.time() - began <= HOLD_S + 1

    run(main())


def test_turn_3_an_attempt_that_ends_frees_the_coordinator_at_once() -> None:
    async def main() -> None:
        turns, loop = Turns(pacing(), keep_all=True), asyncio.get_running_loop()
        first, second = shard(1), shard(2)
        await turns.taken(first)
        turns.given_back(first, leads=True)
        next_one = asyncio.ensure_future(turns.taken(second))
        await asyncio.sleep(5)
        assert not next_one.done()
        turns.ended(first)
        began = loop.time()
        await next_one
        assert loop.time() == began

    run(main())


def test_too_many_that_wait_are_a_crowd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns_module, "WAITING_MAX", 3)

    async def main() -> None:
        turns = Turns(pacing(), keep_all=True)
        for number in range(3):
            assert not turns.is_crowded
            turns.add(shard(number))
        assert turns.is_crowded
        turns.forget(next(iter(turns._waiting)))
        assert not turns.is_crowded

    run(main())
