"""START-2 and START-3 of pipeline/root/starts.py: records of old starts go, and no number is used twice."""

from __future__ import annotations

import pytest

from checkpointd.errors import FencedError, NotFoundError
from checkpointd.layout.keys import start_key
from checkpointd.pipeline.root import own_root, starts
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.pipeline.root.starts import KEPT
from checkpointd.store.memory import MemoryStore


async def numbers(store: MemoryStore) -> list[int]:
    return [int(entry.name) for entry in await store.list(".checkpointd/starts")]


@pytest.mark.parametrize("count", [2 * KEPT, 8 * KEPT])
async def test_start_2_so_many_records_stay_however_many_starts_there_were(count: int) -> None:
    store = MemoryStore()
    for _ in range(count):
        await starts.take(store, 1)
    assert await numbers(store) == list(range(count - KEPT + 1, count + 1))


async def test_start_2_the_record_of_a_surviving_attempts_start_stays_as_long_as_it_survives() -> None:
    store = MemoryStore()
    await starts.take(store, 1)
    for _ in range(2 * KEPT):
        await starts.take(store, 1, ["global_step7/00000001-0"])
    assert await numbers(store) == [1, *range(KEPT + 2, 2 * KEPT + 2)]
    await starts.check_fence(store, 1, "global_step7/00000001-0")
    await starts.take(store, 1)
    assert 1 not in await numbers(store)


async def test_start_3_a_start_that_was_stopped_does_not_begin_a_start_again() -> None:
    store = MemoryStore()
    chosen = await starts.following(store)
    for _ in range(KEPT + 1):
        await starts.take(store, 1)
    with pytest.raises(NotFoundError):
        await starts.read(store, chosen)
    assert await starts.begin(store, chosen, 1) is None
    assert (await starts.take(store, 1)).start == KEPT + 2
    assert await starts.begin(store, KEPT + 4, 1) is not None  # one beyond the next is as good


async def test_a_job_whose_record_went_is_told_that_it_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.01)
    store = MemoryStore()
    first = await starts.take(store, 1)
    root = OwnRoot(store)
    await root.begun(1, first.nonce)
    for _ in range(KEPT):
        await starts.take(store, 1)
    assert await store.stat(start_key(1)) is None
    with pytest.raises(FencedError, match=rf"taken over .*: start {KEPT + 1}, by .* This job is start 1,"):
        await root.check(1)
