"""Where `latest` goes when what it named was removed."""

from __future__ import annotations

import pytest

from checkpointd.layout.keys import LATEST
from checkpointd.pipeline import catalog
from checkpointd.pipeline.pointer import move_latest_away
from checkpointd.store.memory import MemoryStore
from tests.builders import begin_epoch, save_checkpoint


async def test_latest_names_what_is_committed_while_the_last_one_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job beside the command that removes: its commit comes after the look for what is left, and before `latest` goes."""
    store = MemoryStore()
    await save_checkpoint(store, tag="removed", epoch=await begin_epoch(store))
    delete = store.delete

    async def commits_first(key: str) -> None:
        if key == LATEST:
            await save_checkpoint(store, tag="new", epoch=await begin_epoch(store))
        await delete(key)

    for entry in await catalog.attempts_of(store, "removed"):
        for name in entry.sizes:
            await delete(f"{entry.prefix}/{name}")
    monkeypatch.setattr(store, "delete", commits_first)
    assert await move_latest_away(store, "removed") == "new"
    assert await catalog.latest(store) == "new"
