"""What is at a root, as its log has it, with the objects that are there."""

from __future__ import annotations

import pytest

from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import Entry
from checkpointd.store.memory import MemoryStore
from tests.builders import leave_in_doubt, save_checkpoint

TAG, ATTEMPT = "global_step1", AttemptId(1, 0)
PREFIX = f"{TAG}/{ATTEMPT}"


async def test_the_log_alone_tells_what_is_a_checkpoint() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag=TAG, world_size=2)
    before = await root_view.find(store, TAG)
    for entry in await store.list(PREFIX):
        await store.put(f"copy/00000001-0/{entry.name}", await store.get(f"{PREFIX}/{entry.name}"))
        await store.delete(f"{PREFIX}/{entry.name}")
    assert await root_view.find(store, TAG) == before
    assert [c.tag for c in await root_view.checkpoints(store)] == [TAG]
    with pytest.raises(NotFoundError, match="there is no tag 'copy'"):
        await root_view.find(store, "copy")
    assert await root_view.view(store, "copy", ATTEMPT) is None
    assert await root_view.directories(store) == [("copy", ATTEMPT)]


async def test_a_scan_looks_at_the_objects_of_undecided_attempts_alone() -> None:
    store, looks = MemoryStore(), list[str]()
    for step in (1, 2):
        await save_checkpoint(store, tag=f"global_step{step}")
    await leave_in_doubt(store, tag="global_step4", voting=(1,))
    listing = store.list

    async def noted(prefix: str) -> list[Entry]:
        looks.append(prefix)
        return await listing(prefix)

    store.list = noted  # type: ignore[method-assign]
    found = {view.tag: view for view in await root_view.scan(store)}
    assert {tag: (view.state, view.is_looked) for tag, view in found.items()} == {
        "global_step1": ("committed", False),
        "global_step2": ("committed", False),
        "global_step4": ("in-doubt", True),
    }
    assert (found["global_step4"].vote_ranks, found["global_step4"].has_shards) == ([1], True)
    assert looks == ["log", "global_step4/00000001-0"]
    assert found["global_step1"].nbytes > 0


async def test_of_a_tag_that_was_saved_again_the_newest_commit_is_found() -> None:
    store = MemoryStore()
    for k in range(3):
        await save_checkpoint(store, tag="best", k=k, n=k)
    await save_checkpoint(store, tag="best", k=3, n=3, failing={0: RuntimeError("no")})
    assert (await root_view.find(store, "best")).attempt == AttemptId(1, 2)
    views = await root_view.attempts_of(store, "best")
    assert [view.state for view in views] == ["deleted", "committed", "committed", "aborted"]
    assert [c.attempt.k for c in root_view.commits_of(views)] == [2, 1]


async def test_a_tag_that_is_no_checkpoint_says_what_is_there() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag="other")
    await leave_in_doubt(store, tag=TAG, n=7)
    with pytest.raises(NotFoundError, match="00000001-0 is in-doubt; `checkpointd explain"):
        await root_view.find(store, TAG)
