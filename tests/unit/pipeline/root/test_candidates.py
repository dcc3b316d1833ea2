"""CANDIDATE-1 and CANDIDATE-3 of candidates.py: the checkpoints that a load tries, and in which order."""

from __future__ import annotations

import pytest

from checkpointd.errors import NotFoundError
from checkpointd.layout.log_records import RollbackRecord
from checkpointd.pipeline.gc import collect
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import candidates, listed, named, note_passed_over
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import Patience
from tests.builders import save_checkpoint


def now() -> Patience:
    """A look without any patience."""
    return Patience(0.0, 0.0)


async def saves(*save_latest: bool) -> Store:
    """A save for each of `save_latest`, as one job."""
    store = MemoryStore()
    for n, asks in enumerate(save_latest):
        await save_checkpoint(store, tag=f"tag{n}", step=n, n=n, start=1, world_size=1, save_latest=asks)
    return store


async def tried(store: Store) -> list[str]:
    return [c.tag for c in candidates(await root_view.state_of(store))]


async def test_candidate_1_the_newest_comes_first_whatever_latest_says() -> None:
    store = await saves(True, True, False, True)
    await store.put("latest", b"tag0\n")
    assert await tried(store) == ["tag3", "tag1", "tag0"]
    assert [c.tag for c in await listed(store, now())] == ["tag3", "tag2", "tag1", "tag0"]
    assert await named(store, "latest") == "tag3"


async def test_candidate_3_what_comes_after_a_rollback_is_none() -> None:
    store = await saves(True, True, True)
    assert await RootLog.of(store).add(RollbackRecord(attempt="tag0/00000001-0", writer=writer())) == ""
    assert await tried(store) == ["tag0"]
    assert await named(store, None) == "tag0"
    assert [c.tag for c in await listed(store, now())] == ["tag0", "tag2", "tag1"]


async def test_a_load_that_passes_over_a_checkpoint_is_recorded_unless_it_was_removed_meanwhile() -> None:
    store = await saves(True, True)
    await note_passed_over(store, "tag1/00000001-0", "torn")
    assert await collect.remove(store, {"the test": ["tag0/00000001-0"]}) == ""
    await note_passed_over(store, "tag0/00000001-0", "gone")
    attempts = (await root_view.state_of(store)).attempts
    assert [one.passed_over for one in attempts.values()] == ["", "torn"]


async def test_where_nothing_was_committed_latest_names_nothing() -> None:
    with pytest.raises(NotFoundError, match="nothing was committed there yet"):
        await named(MemoryStore(), "latest")
