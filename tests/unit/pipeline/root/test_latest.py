"""POINTER-1 of latest.py: `latest` names the newest checkpoint, whoever moves it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpointd.errors import DamagedError, StoreError
from checkpointd.layout.keys import LATEST
from checkpointd.layout.log_records import entry_key
from checkpointd.pipeline.gc.collect import remove
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import candidates
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from tests.builders import begin_start, save_checkpoint


@pytest.mark.parametrize(
    ("file", "pointer", "is_theirs"),
    [
        ("mp_rank_00_model_states.pt", "theirs", True),
        ("weights.bin", "theirs", True),  # of any program: no name is known here
        (".nfs0001", "theirs", False),
        ("weights.bin", "theirs\n", False),
        (None, "theirs", False),
    ],
)
async def test_a_pointer_of_another_program_is_told_by_what_it_names(
    tmp_path: Path, file: str | None, pointer: str, is_theirs: bool
) -> None:
    async with PosixStore(tmp_path) as store:
        await save_checkpoint(store, tag="ours", start=await begin_start(store))
        (tmp_path / "theirs").mkdir()
        if file is not None:
            (tmp_path / "theirs" / file).touch()
        (tmp_path / LATEST).write_text(pointer)
        assert await root_view.latest(store) == (None if is_theirs else "theirs")
        assert await move_latest(RootLog.of(store), is_start=True) == (None if is_theirs else "ours")
        assert (tmp_path / LATEST).read_text() == (pointer if is_theirs else "ours\n")


@pytest.mark.parametrize("link", ["to the tag", "to a file outside", "to nothing"])
async def test_pointer_1_a_link_at_latest_is_replaced_and_never_followed(tmp_path: Path, link: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    outside.write_text("secret")
    async with PosixStore(root) as store:
        await save_checkpoint(store, tag="one", start=await begin_start(store))
        (root / LATEST).unlink()
        (root / LATEST).symlink_to({"to the tag": "one", "to a file outside": str(outside), "to nothing": "gone"}[link])
        with pytest.raises(DamagedError, match="names nothing"):
            await root_view.latest(store)
        found = candidates(await root_view.state_of(store))
        assert [checkpoint.tag for checkpoint in found] == ["one"]
        await save_checkpoint(store, tag="two", start=await begin_start(store))
        assert await root_view.latest(store) == "two"
    assert outside.read_text() == "secret"


async def test_pointer_1_latest_that_has_changed_since_the_log_was_read_is_not_replaced_before_the_log_is_read_again() -> None:
    class Moved(MemoryStore):
        is_moved = True

        async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
            if not self.is_moved:
                self.is_moved = True
                await save_checkpoint(self, tag="two", n=1)
            return await super().put_if_match(key, expected, data)

    store = Moved()
    await save_checkpoint(store, tag="one", start=await begin_start(store))
    await store.delete(LATEST)
    store.is_moved = False
    assert await move_latest(RootLog.of(store)) == "two"
    assert await root_view.latest(store) == "two"


async def test_a_removed_checkpoint_is_not_named_any_more() -> None:
    store = MemoryStore()
    for n in range(3):
        await save_checkpoint(store, tag=f"tag{n}", step=n, n=n, start=1, world_size=1, save_latest=n < 2)
    for removed, left in ((1, "tag0"), (0, None)):
        assert await remove(store, {"the test": [f"tag{removed}/00000001-0"]}) == ""
        assert await move_latest(RootLog.of(store)) == left
        assert await root_view.latest(store) == left


async def test_a_damaged_log_moves_no_latest() -> None:
    store = MemoryStore()
    await save_checkpoint(store, tag="one", start=await begin_start(store))
    await store.put(LATEST, b"zero\n")
    await store.put(entry_key(RootLog.of(store).state.number + 2), b"{")
    with pytest.raises(StoreError, match="cannot be read to its end"):
        await move_latest(RootLog.of(store))
    assert await store.get(LATEST) == b"zero\n"


def test_a_move_that_hangs_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        store = MemoryStore()
        await save_checkpoint(store, tag="one", start=await begin_start(store))
        await store.delete(LATEST)

        async def hangs(key: str, expected: bytes | None, data: bytes) -> bool:
            await asyncio.sleep(1000)
            return False

        monkeypatch.setattr(store, "put_if_match", hangs)
        with pytest.raises(StoreError, match="could not be moved within"):
            await move_latest(RootLog.of(store))
        assert asyncio.get_running_loop().time() < 1000

    simloop.run(1, main())
