"""The ballast: what makes room on a full disk can always be written."""

from __future__ import annotations

import pytest

from checkpointd.errors import StoreFullError, UsageError
from checkpointd.layout.keys import README, check_tag
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


async def test_a_readme_of_six_lines_is_laid_once() -> None:
    store = MemoryStore()
    await reserve.lay(store)
    text = (await store.get(README)).decode()
    assert len(text.splitlines()) == 6
    for word in ("checkpointd list .", "checkpointd delete . TAG", "Never by hand", "latest"):
        assert word in text
    await store.put(README, b"our own words")
    await reserve.lay(store)
    assert await store.get(README) == b"our own words"


async def test_a_disk_without_room_for_the_readme_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()

    async def full(*_: object, **__: object) -> bool:
        raise StoreFullError("the disk is full")

    monkeypatch.setattr(MemoryStore, "put_if_absent", full)
    await reserve.lay(store)
    assert await store.list("") == []


def test_no_tag_is_called_like_the_readme() -> None:
    with pytest.raises(UsageError, match="explains the root"):
        check_tag(README)
