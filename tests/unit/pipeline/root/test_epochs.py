"""EPOCH-2 and EPOCH-3 of pipeline/root/epochs.py: records of old epochs go, and no number is begun twice."""

from __future__ import annotations

import pytest

from checkpointd.errors import FencedError, NotFoundError
from checkpointd.layout.keys import epoch_key
from checkpointd.pipeline.root import epochs, own_root
from checkpointd.pipeline.root.epochs import KEPT
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.store.memory import MemoryStore


async def numbers(store: MemoryStore) -> list[int]:
    return [int(entry.name) for entry in await store.list(".checkpointd/epochs")]


@pytest.mark.parametrize("starts", [2 * KEPT, 8 * KEPT])
async def test_epoch_2_so_many_records_stay_however_many_starts_there_were(starts: int) -> None:
    store = MemoryStore()
    for _ in range(starts):
        await epochs.take(store, 1)
    assert await numbers(store) == list(range(starts - KEPT + 1, starts + 1))


async def test_epoch_2_the_record_of_a_surviving_attempts_epoch_stays_as_long_as_it_survives() -> None:
    store = MemoryStore()
    await epochs.take(store, 1)
    for _ in range(2 * KEPT):
        await epochs.take(store, 1, ["global_step7/00000001-0"])
    assert await numbers(store) == [1, *range(KEPT + 2, 2 * KEPT + 2)]
    await epochs.check_fence(store, 1, "global_step7/00000001-0")
    await epochs.take(store, 1)
    assert 1 not in await numbers(store)


async def test_epoch_3_a_start_that_was_stopped_does_not_begin_an_epoch_again() -> None:
    store = MemoryStore()
    chosen = await epochs.following(store)
    for _ in range(KEPT + 1):
        await epochs.take(store, 1)
    with pytest.raises(NotFoundError):
        await epochs.read(store, chosen)
    assert await epochs.begin(store, chosen, 1) is None
    assert (await epochs.take(store, 1)).epoch == KEPT + 2
    assert await epochs.begin(store, KEPT + 4, 1) is not None  # one beyond the next is as good


async def test_a_job_whose_record_went_is_told_that_it_is_fenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.01)
    store = MemoryStore()
    first = await epochs.take(store, 1)
    root = OwnRoot(store)
    await root.begun(1, first.nonce)
    for _ in range(KEPT):
        await epochs.take(store, 1)
    assert await store.stat(epoch_key(1)) is None
    with pytest.raises(FencedError, match=f"epoch 1 .* is over: epoch {KEPT + 1} was begun"):
        await root.check(1)
