"""What is at a root, as its log has it, with the objects that are there."""

from __future__ import annotations

import pytest

from checkpointd.commit.branches import commits_of
from checkpointd.errors import NotFoundError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.root import root_view
from checkpointd.store.memory import MemoryStore
from tests.builders import attempts_at, leave_in_doubt, save_checkpoint

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
    assert await root_view.logged(store, f"copy/{ATTEMPT}") is None
    assert await root_view.directories(store) == [("copy", ATTEMPT)]


async def test_of_a_tag_that_was_saved_again_the_newest_commit_is_found() -> None:
    store = MemoryStore()
    for k in range(3):
        await save_checkpoint(store, tag="best", k=k, n=k)
    await save_checkpoint(store, tag="best", k=3, n=3, failing={0: RuntimeError("no")})
    assert (await root_view.find(store, "best")).id == AttemptId(1, 2)
    attempts = await attempts_at(store, "best")
    assert [one.status for one in attempts] == ["removed", "checkpoint", "checkpoint", "aborted"]
    assert [c.id.k for c in commits_of(attempts)] == [2, 1]


async def test_a_tag_that_is_no_checkpoint_says_what_is_there() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag="other")
    await leave_in_doubt(store, tag=TAG, n=7)
    with pytest.raises(NotFoundError, match="00000001-0 is in-doubt; `checkpointd explain"):
        await root_view.find(store, TAG)
