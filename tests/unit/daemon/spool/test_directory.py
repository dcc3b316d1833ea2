"""SPOOL-11, and what a start finds in a spool: other directories beside it, records that cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from checkpointd.commit.machine import IN_SPOOL
from checkpointd.config import SpoolConfig
from checkpointd.daemon.spool.directory import SpoolDirectory
from checkpointd.daemon.spool.record import SPOOLED
from checkpointd.errors import NotFoundError, UnreadableError
from checkpointd.store.memory import MemoryStore
from checkpointd.testing import simloop
from tests.spooled_saves import AwayStore, MemoryPlace, Node, begun_root, contents, until


@pytest.mark.parametrize("name", ["ckpts", "run-0123456789abcdef"])
async def test_spool_11_a_root_that_lies_in_the_directory_of_a_spool_keeps_all_its_objects(tmp_path: Path, name: str) -> None:
    chunks = tmp_path / name / "global_step1" / "00000001-0" / "00000-0.chunks"
    chunks.parent.mkdir(parents=True)
    chunks.write_bytes(b"a committed checkpoint")
    directory = SpoolDirectory(SpoolConfig(directory=str(tmp_path)))
    assert await directory.found() == []
    assert await directory.sweep() == 0
    await directory.close()
    assert chunks.read_bytes() == b"a committed checkpoint"


async def test_what_is_left_in_one_root_s_part_is_found_whatever_lies_beside_it(tmp_path: Path) -> None:
    directory = SpoolDirectory(SpoolConfig(directory=str(tmp_path)))
    store = (await directory.at("/mnt/run")).store
    await store.put_if_absent("global_step9/00000001-0/00000-0.chunks", b"cut off")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "global_step1").mkdir()
    broken = tmp_path / "a-0123456789abcdef"
    os.symlink("nowhere", broken)
    assert await directory.place.names() == [(await directory.at("/mnt/run")).name]
    assert await directory.sweep() == 1
    await directory.close()


@pytest.mark.parametrize("error", [NotFoundError("another process has dropped it"), UnreadableError("input/output error")])
def test_a_record_that_cannot_be_read_hides_no_other_one(error: Exception) -> None:
    class Unread(MemoryStore):
        hidden = ""

        async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
            if key == self.hidden:
                raise error
            return await super().get(key, size_max=size_max)

    async def main() -> None:
        root = AwayStore(MemoryStore())
        place = MemoryPlace(made=Unread)
        node = await Node(root, SpoolConfig(directory="/spool"), nonce=await begun_root(root), place=place).begin()
        root.away = True
        for step in (1, 2):
            node.save(step)
            await until(lambda: node.attempts[-1].phase in IN_SPOOL)
        await node.dies()
        (store,) = place.stores.values()
        assert isinstance(store, Unread)
        store.hidden = min(key for key in contents(store) if key.startswith(f"{SPOOLED}/"))
        found = await SpoolDirectory(node.config, place).found()
        assert len(found) == 1

    simloop.run(1, main())


def test_what_was_saved_with_other_options_of_the_url_is_found() -> None:
    async def main() -> None:
        url, root = "s3://bucket/run?retry_s=60", AwayStore(MemoryStore())
        node = await Node(root, SpoolConfig(directory="/spool"), nonce=await begun_root(root)).begin()
        node.own.root = await node.directory.at(url)
        root.away = True
        node.save(1)
        await until(lambda: node.attempts[0].phase in IN_SPOOL)
        await node.dies()
        directory = SpoolDirectory(node.config, node.place)
        (left,) = await directory.found()
        at = await directory.at("s3://bucket/run?retry_s=600")
        assert (left.record.url, at.url, left.spool) == (url, "s3://bucket/run?retry_s=600", at)
        await directory.found()
        assert at.url == "s3://bucket/run?retry_s=600"

    simloop.run(1, main())
