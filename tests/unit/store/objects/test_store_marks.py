"""The store in a bucket knows whether it has won, whatever happens to its requests: OBJECT-2, OBJECT-3."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from checkpointd.errors import StoreError
from checkpointd.store.objects.store import MARKS_MAX, ObjectStore
from checkpointd.testing import simloop
from checkpointd.testing.simbucket import Fate, Request, SimBucket, SimClient


def simulated(work: Callable[[SimBucket, ObjectStore], Coroutine[Any, Any, None]], seed: int = 1, **options: Any) -> None:
    """Run `work` with a store in a simulated bucket."""

    async def main() -> None:
        bucket = SimBucket(**options)
        await work(bucket, ObjectStore(SimClient(bucket)))

    simloop.run(seed, main())


def meets(bucket: SimBucket, fate: Fate, kind: str) -> None:
    """Let the next request of `kind` meet `fate`."""

    def before(request: Request) -> Fate | None:
        if request.kind != kind:
            return None
        bucket.before = lambda _: None
        return fate

    bucket.before = before


async def others_replace(bucket: SimBucket, store: ObjectStore, times: int) -> None:
    """Replace "x" as often, as soon as it holds b"mine"."""
    while await store.get("x") != b"mine":
        await asyncio.sleep(0.001)
    for number in range(times):
        current = await store.get("x")
        assert await store.put_if_match("x", current, f"other {number}".encode())


@pytest.mark.parametrize("numbered", [False, True])
def test_object_2_a_win_whose_reply_was_lost_is_a_win(numbered: bool) -> None:
    async def work(bucket: SimBucket, store: ObjectStore) -> None:
        meets(bucket, "repeated", "create")
        assert await store.put_if_absent("x", b"old")
        meets(bucket, "repeated", "create")
        assert not await store.put_if_absent("x", b"new")
        meets(bucket, "repeated", "replace")
        assert await store.put_if_match("x", b"old", b"new")
        assert await store.get("x") == b"new"

    simulated(work, numbered=numbered)


@pytest.mark.parametrize("kind", ["create", "replace"])
@pytest.mark.parametrize("times", [1, 2, MARKS_MAX - 1])
def test_object_2_a_win_is_a_win_although_others_have_replaced_the_object_since(kind: str, times: int) -> None:
    async def work(bucket: SimBucket, store: ObjectStore) -> None:
        other = ObjectStore(SimClient(bucket))
        expected = None
        if kind == "replace":
            expected = b"old"
            await store.put("x", expected)
        bucket.delay_s = lambda *_: 1e-6  # type: ignore[method-assign]  # the others are faster than the repetition
        meets(bucket, "repeated", kind)
        mine = asyncio.ensure_future(store.put_if_match("x", expected, b"mine"))
        if expected is None:
            await asyncio.sleep(0.01)
        await others_replace(bucket, other, times)
        assert not mine.done()
        assert await mine
        assert await store.get("x") == f"other {times - 1}".encode()

    simulated(work)


def test_object_2_who_comes_after_another_has_lost() -> None:
    async def work(bucket: SimBucket, store: ObjectStore) -> None:
        await store.put("x", b"old")
        assert await store.put_if_match("x", b"old", b"mine")
        assert not await store.put_if_match("x", b"old", b"yours")
        assert not await store.put_if_absent("x", b"yours")
        await store.put("x", b"put")
        assert await store.put_if_match("x", b"put", b"mine")
        await store.delete("x")
        assert not await store.put_if_match("x", b"mine", b"yours")

    simulated(work)


@pytest.mark.parametrize("fate", ["lost", "unanswered", "late"])
def test_object_3_a_request_that_did_not_come_through_raises(fate: Fate) -> None:
    async def work(bucket: SimBucket, store: ObjectStore) -> None:
        meets(bucket, fate, "create")
        with pytest.raises(StoreError, match="'x'"):
            await store.put_if_absent("x", b"mine")
        assert (await store.stat("x") is None) is (fate != "unanswered")

    simulated(work)


@pytest.mark.parametrize("numbered", [False, True])
def test_store_1_one_of_many_racing_processes_wins_whatever_happens_to_their_requests(numbered: bool) -> None:
    """Nobody is told that it lost unless another one has won, and no two win, also if some are told nothing or die."""
    outcomes: set[str] = set()

    def race(seed: int) -> None:
        async def main() -> None:
            bucket = SimBucket(
                numbered=numbered, weather={"repeated": 0.2, "slow down": 0.1, "unanswered": 0.1, "late": 0.1, "lost": 0.1}
            )
            told: dict[str, str] = {}

            async def racer(client: SimClient) -> None:
                name = client.process.name
                try:
                    won = await ObjectStore(client).put_if_absent("t/a/outcome", name.encode())
                except StoreError:
                    told[name] = "nothing"
                else:
                    told[name] = "won" if won else "lost"

            for number in range(5):
                client = bucket.process(f"racer{number}")
                client.process.spawn(racer(client))
            await asyncio.sleep(bucket.rng.random() * 0.02)
            bucket.kill("racer0")
            await asyncio.sleep(1000)
            winner = bucket.state.objects.get("t/a/outcome")
            if winner is not None:
                assert told.get(winner.data.decode()) != "lost"
                assert all(winner.data.decode() == name for name, what in told.items() if what == "won")
            assert winner is not None or set(told.values()) <= {"nothing"}
            outcomes.update(told.values())

        simloop.run(seed, main())

    for seed in range(200):
        race(seed)
    assert outcomes == {"won", "lost", "nothing"}
