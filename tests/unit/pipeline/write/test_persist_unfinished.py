"""UNFINISHED-1 of store/posix/unfinished.py: what others filled for a checkpoint is durable before the rank votes yes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.posix.unfinished import UnfinishedDirectories
from tests.builders import Save, save_checkpoint

NAME = "00000001-0"


def fill(store: PosixStore) -> None:
    """What a trainer writes beside the checkpoint."""
    assert store.plain_files is not None
    place = Path(store.plain_files.unfinished.path(NAME, "checkpoint-8"))
    place.mkdir(parents=True)
    (place / "trainer_state.json").write_text("{}")


async def test_unfinished_1_what_others_filled_is_durable_before_the_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    settle, put, info = UnfinishedDirectories.settle, PosixStore.put_if_absent, Save.info

    async def settled(directories: UnfinishedDirectories, name: str) -> None:
        await settle(directories, name)
        done.append(name)

    async def voted(store: PosixStore, key: str, data: bytes, *, durable: bool = True) -> bool:
        if key.endswith(".vote"):
            done.append("vote")
        return await put(store, key, data, durable=durable)

    def of_unfinished(save: Save, rank: int) -> AttemptInfo:
        return replace(info(save, rank), unfinished=NAME)

    monkeypatch.setattr(UnfinishedDirectories, "settle", settled)
    monkeypatch.setattr(PosixStore, "put_if_absent", voted)
    monkeypatch.setattr(Save, "info", of_unfinished)
    store = PosixStore(tmp_path / ".checkpointd")
    fill(store)
    (attempt,) = await save_checkpoint(store, world_size=1)
    assert attempt.phase is Phase.COMMITTED
    assert done == [NAME, "vote"]
