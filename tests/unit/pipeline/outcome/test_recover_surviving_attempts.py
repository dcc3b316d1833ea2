"""RECOVER-2 of recover.py: attempts whose writers outlive their trainers."""

from __future__ import annotations

import pytest

from checkpointd.layout.log_records import AbortRecord, CommitRecord
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from tests.builders import leave_in_doubt, restart

TAG = "global_step1"
PREFIX = f"{TAG}/00000001-0"


async def objects(store: Store, prefix: str) -> dict[str, int]:
    return {entry.name: entry.size for entry in await store.list(prefix)}


# --- recovery ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("voting", [(), (1,), (0, 1)])
async def test_recover_2_a_surviving_attempt_is_left_alone_and_the_next_start_decides_it(voting: tuple[int, ...]) -> None:
    store = MemoryStore()
    save = await leave_in_doubt(store, voting=voting)
    await store.put(save.info(0).key("00000-1.chunks"), b"being written")
    before = await objects(store, PREFIX)
    done = await restart(store, PREFIX)
    assert (done.decided, done.swept, done.strays) == ([], 0, 0)
    assert await objects(store, PREFIX) == before
    [decided] = (await restart(store)).decided
    assert type(decided) is (CommitRecord if voting == (0, 1) else AbortRecord)
