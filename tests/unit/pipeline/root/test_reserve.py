"""The ballast: what makes room on a full disk can always be written."""

from __future__ import annotations

import pytest

from checkpointd.errors import StoreFullError
from checkpointd.pipeline.root import reserve
from checkpointd.store.memory import MemoryStore


async def test_work_on_a_full_disk_runs_again_with_the_space_of_the_ballast() -> None:
    store = MemoryStore()
    await reserve.take_aboard(store)

    async def removes() -> str:
        if await store.stat(reserve.KEY) is not None:
            raise StoreFullError("the disk is full")
        return "removed"

    assert await reserve.on_full_disk(store, removes) == "removed"
    assert await store.stat(reserve.KEY) == reserve.BALLAST_BYTES


async def test_a_disk_that_is_full_without_the_ballast_is_said() -> None:
    store = MemoryStore()

    async def fails() -> str:
        raise StoreFullError("the disk is full")

    with pytest.raises(StoreFullError):
        await reserve.on_full_disk(store, fails)
