"""Many writers that want the same object of a bucket at once, on a real server, while requests and replies get lost.

Each race has one winner, which is told so, and the object is the winner's. `--bucket-races` says how many there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from checkpointd.store import open_store
from checkpointd.store.base import Store
from tests.faults.test_bucket_rounds import NOISE, NOISY
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.fixtures import Place, root_at

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio, pytest.mark.timeout(7200)]

WRITERS = 16
AT_ONCE = 8
"""So many races at once: the losers of one wait for the server, about a second each time."""


async def winner_of(race: Callable[[Store, bytes], Awaitable[bool]], stores: list[Store]) -> bytes:
    """The body of the only writer that won."""
    bodies = [b"writer %d" % number for number in range(len(stores))]
    won = await asyncio.gather(*(race(store, body) for store, body in zip(stores, bodies, strict=True)))
    assert won.count(True) == 1, won
    return bodies[won.index(True)]


async def race_to_create(stores: list[Store], key: str) -> bytes:
    return await winner_of(lambda store, body: store.put_if_absent(key, body), stores)


async def race_to_replace(stores: list[Store], key: str) -> bytes:
    await stores[0].put_if_absent(key, b"before")  # a `put` that is repeated later would bring this back
    return await winner_of(lambda store, body: store.put_if_match(key, b"before", body), stores)


@pytest.mark.parametrize("race", [race_to_create, race_to_replace])
async def test_a_race_of_many_writers_has_one_winner(
    seaweed_place: Place,
    seaweed_proxy: FaultyProxy,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
    race: Callable[[list[Store], str], Awaitable[bytes]],
) -> None:
    for fault in NOISE:
        seaweed_proxy.add(fault, times=None, probability=NOISY)
    url = root_at(seaweed_place, monkeypatch, endpoint=seaweed_proxy.endpoint, retry_s="120", request_s="20")
    free, winners = asyncio.Semaphore(AT_ONCE), dict[str, bytes]()

    async def run(key: str) -> None:
        async with free:
            winners[key] = await race(stores, key)
            for store in stores:
                assert await store.get(key) == winners[key]

    async with AsyncExitStack() as opened:
        stores = [await opened.enter_async_context(open_store(url)) for _ in range(WRITERS)]
        async with asyncio.TaskGroup() as races:
            for number in range(pytestconfig.getoption("--bucket-races")):
                races.create_task(run(f"t/{number}/outcome"))
        seaweed_proxy.deliver()
        for key, winner in winners.items():
            assert await stores[0].get(key) == winner
    assert len(winners) == pytestconfig.getoption("--bucket-races")
