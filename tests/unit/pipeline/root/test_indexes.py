"""pipeline/root/indexes.py: the plans with which the indexes begin that votes name."""

from __future__ import annotations

import msgspec
import pytest

from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import object_key, vote_name
from checkpointd.layout.manifest import Vote
from checkpointd.pipeline.root import indexes, root_view
from checkpointd.pipeline.root.indexes import index_named_by, plans_named_by
from checkpointd.store.memory import MemoryStore
from tests.builders import save_checkpoint

PREFIX = "global_step1/00000001-0"


async def saved() -> tuple[MemoryStore, list[Vote]]:
    store = MemoryStore()
    await save_checkpoint(store)
    return store, [await root_view.read_vote(store, object_key(PREFIX, vote_name(rank))) for rank in range(2)]


@pytest.fixture(autouse=True, params=[0, indexes.WHOLE_BYTES], ids=["by itself", "with others"])
def read_so(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan is read alone, or the whole index is read with others."""
    monkeypatch.setattr(indexes, "WHOLE_BYTES", request.param)


async def test_a_plan_has_the_boxes_of_its_index() -> None:
    store, votes = await saved()
    for vote, plan in zip(votes, await plans_named_by(store, votes), strict=True):
        index = await index_named_by(store, PREFIX, vote)
        assert plan.tensors == tuple(entry.part for entry in index.tensors)
        assert (plan.rank, plan.world_size) == (index.rank, index.world_size)


async def test_a_plan_with_other_bytes_is_damaged_and_chunks_behind_it_are_not_looked_at() -> None:
    store, votes = await saved()
    assert votes[0].index is not None
    key, size = object_key(PREFIX, votes[0].index.name), votes[0].index.plan.size
    data = bytearray(await store.get(key))
    data[size] ^= 1
    await store.put(key, bytes(data))
    assert len(await plans_named_by(store, votes)) == 2
    data[size - 1] ^= 1
    await store.put(key, bytes(data))
    with pytest.raises(DamagedError, match="the bytes of its plan are not those that its vote names"):
        await plans_named_by(store, votes)


async def test_an_index_that_is_cut_or_gone_has_no_plan() -> None:
    store, votes = await saved()
    assert votes[1].index is not None
    key = object_key(PREFIX, votes[1].index.name)
    await store.put(key, (await store.get(key))[: votes[1].index.plan.size - 1])
    with pytest.raises(DamagedError):
        await plans_named_by(store, votes)
    await store.delete(key)
    with pytest.raises(NotFoundError):
        await plans_named_by(store, votes)


async def test_a_vote_that_names_the_plan_of_another_rank_is_refused() -> None:
    store, votes = await saved()
    with pytest.raises(DamagedError, match="has the plan of rank 1 of 2, not of rank 0"):
        await plans_named_by(store, [msgspec.structs.replace(votes[0], index=votes[1].index)])
