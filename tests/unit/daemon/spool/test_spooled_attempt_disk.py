"""SPOOL-6, SPOOL-8, SPOOL-9 and SENDING-1: saves when the spool's own disk is full, fails or damages them, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from checkpointd.commit.machine import IN_SPOOL, Phase
from checkpointd.errors import StoreError, StoreFullError, UnreadableError
from checkpointd.store.base import ObjectWriter
from checkpointd.store.memory import MemoryStore
from tests.spooled_saves import (
    HOUR_S,
    AwayStore,
    MemoryPlace,
    Node,
    begun_root,
    committed,
    contents,
    damage,
    node_at,
    phases,
    run,
    spool,
    until,
)


def test_spool_8_a_full_spool_sends_the_save_straight_to_the_root() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bytes_max=4 << 20)
        node.save(1, nbytes=2 << 20)
        await until(lambda: bool(node.freed))
        root.away = False
        node.save(2, nbytes=2 << 20)
        node.save(3, nbytes=32 << 20)
        await node.over()
        assert Phase.SPOOLED not in phases(node, 2)
        assert node.directory.counts.direct_full >= 1
        assert await committed(root) == ["global_step3", "global_step2", "global_step1"]

    run(main())


class FullStore(MemoryStore):
    """A disk that is full although it said that it had room."""

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> Any:
        from checkpointd.errors import StoreFullError

        raise StoreFullError("no space left on device")


class BrokenStore(MemoryStore):
    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> Any:
        from checkpointd.errors import StoreError

        raise StoreError("input/output error")


@pytest.mark.parametrize(("kind", "count"), [(FullStore, "direct_full"), (BrokenStore, "direct_failed")])
def test_spool_8_a_spool_that_fails_costs_no_save(kind: type[MemoryStore], count: str) -> None:
    async def main() -> None:
        root = MemoryStore()
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=kind)).begin()
        node.save(1)
        await node.over()
        assert await committed(root) == ["global_step1"]
        assert getattr(node.directory.counts, count) == 1
        assert not [key for key in node.place.keys if "global_step1" in key]

    run(main())


def test_spool_8_a_record_whose_put_failed_is_not_left_behind() -> None:
    class Torn(MemoryStore):
        """A disk that fails after it has put a record."""

        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            put = await super().put_if_absent(key, data, durable=durable)
            if "/spooled/" in key:
                raise StoreError("input/output error")
            return put

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=Torn)).begin()
        node.save(1)
        await node.over()
        assert node.directory.counts.direct_failed == 1
        assert await committed(root) == ["global_step1"]
        assert not [key for key in node.place.keys if "/spooled/" in key or key.startswith("global_step1/")]

    run(main())


def test_spool_9_a_disk_that_fails_now_and_then_beside_the_root_loses_no_shard() -> None:
    class Refusing(AwayStore):
        refuses = False

        async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
            if self.refuses:
                raise StoreError("slow down")
            return await super().open_writer(key, size_hint=size_hint, size_max=size_max)

    class Glitching(MemoryStore):
        tries = 0

        async def get(self, key: str, *, size_max: int = 1 << 30) -> bytes:
            if key.endswith(".index"):
                self.tries += 1
                root.refuses = self.tries in (2, 4, 6, 8)
                if self.tries in (1, 3, 5, 7, 9):
                    raise UnreadableError("input/output error")
            return await super().get(key, size_max=size_max)

    root = Refusing(MemoryStore())

    async def main() -> None:
        nonce = await begun_root(root)
        node = await Node(root, spool(), nonce=nonce, place=MemoryPlace(made=Glitching)).begin()
        node.save(1)
        await node.over()
        (store,) = node.place.stores.values()
        assert isinstance(store, Glitching)
        assert (store.tries, await committed(root)) == (10, ["global_step1"])

    run(main())


@pytest.mark.parametrize("error", ["full", "read-only"])
def test_spool_9_a_disk_that_takes_no_more_writes_ends_no_upload(error: str) -> None:
    """It can be full of other programs' files, and then only the uploads make room."""

    class Frozen(MemoryStore):
        frozen = False

        async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
            if self.frozen:
                raise StoreFullError("no space left on device") if error == "full" else StoreError("read-only file system")
            return await super().put_if_absent(key, data, durable=durable)

        async def delete(self, key: str, *, durable: bool = True) -> None:
            if self.frozen and error != "full":
                raise StoreError("read-only file system")
            await super().delete(key, durable=durable)

    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await Node(root, spool(), nonce=await begun_root(root), place=MemoryPlace(made=Frozen)).begin()
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        assert isinstance(store, Frozen)
        store.frozen = True
        root.away = False
        await node.over()
        assert attempt.phase is Phase.COMMITTED
        assert asyncio.get_running_loop().time() < HOUR_S
        assert await committed(root) == ["global_step1"]

    run(main())


def test_spool_6_only_committed_shards_go_for_room() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root, bytes_max=5 << 20)
        node.save(1, nbytes=2 << 20)
        await node.over()
        assert [key for key in node.place.keys if key.startswith("global_step1/")], "it stays for restarts"
        root.away = True
        node.save(2, nbytes=2 << 20)
        await until(lambda: node.attempts[1].phase in IN_SPOOL)
        assert not [key for key in node.place.keys if key.startswith("global_step1/")]
        node.save(3, nbytes=2 << 20)
        await asyncio.sleep(60)
        assert node.attempts[1].phase in IN_SPOOL
        assert [key for key in node.place.keys if key.startswith("global_step2/")]
        root.away = False
        await node.over()
        assert node.attempts[2].phase is Phase.FAILED, "as without a spool"
        assert await committed(root) == ["global_step2", "global_step1"]

    run(main())


@pytest.mark.parametrize("what", [".chunks", ".index"])
def test_sending_1_damage_in_the_spool_never_becomes_a_checkpoint(what: str) -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        (key,) = [key for key in contents(store) if key.endswith(what)]
        damage(store, key, 500)
        root.away = False
        await node.over()
        assert attempt.phase is Phase.FAILED
        assert "spool lost this shard" in str(attempt.error)
        assert await committed(root) == []
        assert not [key for key in contents(root) if key.endswith((".chunks", ".index"))]
        node.save(2)
        await node.over()
        assert await committed(root) == ["global_step2"]

    run(main())


def test_sending_1_a_truncated_object_is_found() -> None:
    async def main() -> None:
        root = AwayStore(MemoryStore())
        node = await node_at(root)
        root.away = True
        attempt = node.save(1)
        await until(lambda: attempt.phase in IN_SPOOL)
        (store,) = node.place.stores.values()
        (key,) = [key for key in contents(store) if key.endswith(".chunks")]
        contents(store)[key] = contents(store)[key][:-5000]
        root.away = False
        await node.over()
        assert attempt.phase is Phase.FAILED
        assert await committed(root) == []

    run(main())
