"""What a reader takes, and what it takes instead. Invariant READER-2 of `read/choice.py`; READER-1 is the store's,
opened to be read.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, NotFoundError, UnreadableError
from checkpointd.pipeline.read import choice
from checkpointd.pipeline.read.choice import CheckpointFinder
from checkpointd.store.posix.store import PosixStore
from tests.builders import begin_start, delete_checkpoint, plan_save

TORN = DamagedError("the bytes are not those that were written")


async def committed(root: Path, *steps: int) -> PosixStore:
    store = PosixStore(root)
    await begin_start(store)
    for step in steps:
        await (await plan_save(store, tag=f"global_step{step}", step=step)).run_all()
    return store


async def test_where_they_go_faster_than_they_are_read_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "REMOVED_MAX", 3)
    store = await committed(tmp_path, 1, 2, 3, 4)
    reader = CheckpointFinder(PosixStore(tmp_path, read_only=True), None)
    found = (await reader.begin()).checkpoint
    for _ in range(2):
        await delete_checkpoint(store, found.tag)
        found = (await reader.instead(found, TORN)).checkpoint
    await delete_checkpoint(store, found.tag)
    with pytest.raises(NotFoundError, match="keep_last"):
        await reader.instead(found, TORN)


@pytest.mark.parametrize("name", ["ballot-", "00001.index"])
async def test_what_cannot_be_read_now_is_read_again_and_no_older_one_is_taken(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await committed(tmp_path, 1, 2)
    get, get_range, failing = PosixStore.get, PosixStore.get_range, 2

    def look(key: str) -> None:
        nonlocal failing
        if key.startswith("global_step2/") and name in key and failing:
            failing -= 1
            raise UnreadableError("the file server is failing over")

    async def flaky(self: PosixStore, key: str, **options: int) -> bytes:
        look(key)
        return await get(self, key, **options)

    async def flaky_range(self: PosixStore, key: str, offset: int, out: memoryview) -> None:
        look(key)
        await get_range(self, key, offset, out)

    monkeypatch.setattr(PosixStore, "get", flaky)
    monkeypatch.setattr(PosixStore, "get_range", flaky_range)
    store = PosixStore(tmp_path, read_only=True)
    assert (await CheckpointFinder(store, None).begin()).checkpoint.tag == "global_step2"
    assert failing == 0
    failing = sys.maxsize
    with pytest.raises(UnreadableError, match="failing over"):
        await CheckpointFinder(store, None, config=LoadConfig(retry_s=0.1, absence_s=0.1)).begin()
