"""What a client says of its start is believed when the store shows it; a storage that cannot tell now refuses nobody."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from pathlib import Path

import pytest

from checkpointd.daemon.protocol import wire
from checkpointd.errors import StoreError, UnreadableError
from checkpointd.layout.keys import AttemptId, start_key
from checkpointd.layout.manifest import Start, encode
from checkpointd.pipeline.identity import writer
from checkpointd.pipeline.root import own_root
from checkpointd.store.base import SMALL_BYTES_MAX
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.writers import new_writer
from tests.unit.daemon.conftest import Daemon, RawClient, shard_of, until

SHARD = shard_of()
RECORD = start_key(1)


@pytest.fixture(autouse=True)
def absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.05)


async def begin_unseen(client: RawClient, nonce: str) -> None:
    """Say that start 1 has begun, whatever the store shows."""
    client.root = ""
    await client.begin(1, nonce=nonce)


@pytest.mark.parametrize("shown", ["another nonce", "no record", "no root", "a link to the record", "a record that is damaged"])
async def test_a_start_that_the_store_does_not_show_is_refused(
    daemon: Daemon, store: PosixStore, root: Path, shown: str
) -> None:
    client = await daemon.client()
    await client.join(root)
    if shown == "no record":
        (root / RECORD).unlink()
    elif shown == "no root":
        shutil.rmtree(root)
    elif shown == "a link to the record":
        (root / RECORD).rename(root / "elsewhere")
        (root / RECORD).symlink_to(root / "elsewhere")
    elif shown == "a record that is damaged":
        (root / RECORD).write_bytes(b"\xff" * 99)
    await begin_unseen(client, "n2" if shown == "another nonce" else "n1")
    refused = await client.refused()
    assert f"file system at {root}, does not see that the job began there: " in refused.message
    assert ("same node, mount namespace or volume" in refused.message) == (refused.code == "RootGoneError")
    assert "put it back" not in refused.message
    await client.save(1)
    assert "send begin first" in (await client.refused()).message


async def test_a_refused_start_changes_nothing_of_the_one_before(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """Neither what is held nor what was seen at the root is forgotten for it, and saves go on."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    remade: list[str] = []
    daemon.hub.on_remade = remade.append
    await begin_unseen(client, "n2")
    assert (await client.refused()).code == "RootGoneError"
    await client.send(wire.Look())
    assert [held.nonce for held in (await client.next(wire.Joined)).held] == ["n1"]
    assert remade == []
    await client.slot(1, SHARD)
    await client.whole_save(2, SHARD, slot=1)
    assert (await client.outcome(2)).phase == "committed"


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_storage_that_cannot_tell_now_refuses_nobody(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Its saves look again before they vote."""
    works, get = asyncio.Event(), PosixStore.get

    async def troubled(self: PosixStore, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        if key == RECORD and not works.is_set():
            if how == "fails":
                raise UnreadableError("EIO")
            await works.wait()
        return await get(self, key, size_max=size_max)

    monkeypatch.setattr(PosixStore, "get", troubled)
    monkeypatch.setattr(own_root, "ANSWER_S", 0.2)
    client = await daemon.client()
    with caplog.at_level(logging.WARNING, "checkpointd"):
        await client.ready(root, SHARD)
        await client.send(wire.Look())
        await client.next(wire.Joined)
    assert "whether start 1 is of this root cannot be seen now" in caplog.text
    works.set()
    await client.whole_save(1, SHARD)
    assert (await client.outcome(1)).phase == "committed"
    assert not [message for message in client.heard if isinstance(message, wire.Refused)]


async def test_what_could_not_be_seen_then_is_not_believed_later(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OWNROOT-1"""

    async def troubled(self: PosixStore, key: str) -> None:
        raise StoreError("EIO")

    identity = PosixStore.identity
    monkeypatch.setattr(PosixStore, "identity", troubled)
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.send(wire.Look())
    await client.next(wire.Joined)
    monkeypatch.setattr(PosixStore, "identity", identity)
    (root / RECORD).unlink()
    await client.whole_save(1, SHARD)
    ended = await client.outcome(1)
    assert ended.error is not None
    assert (ended.phase, ended.error.code) == ("failed", "RootGoneError")


@pytest.mark.parametrize("surviving", [(), (f"global_step1/{AttemptId(1, 0)}",)], ids=["none survives", "one survives"])
@pytest.mark.parametrize("goes", ["is killed", "closes"])
async def test_a_job_that_was_taken_over_touches_nothing_of_the_newer_one(
    daemon: Daemon, store: PosixStore, root: Path, surviving: tuple[str, ...], goes: str
) -> None:
    """Its trainer, which still runs, joins again after the daemon was started anew, say. Its surviving attempts go on."""
    newer = Start(start=2, nonce="n2", world_size=1, process=new_writer(), surviving=surviving, writer=writer())
    await store.put(start_key(2), encode(newer))
    client = await daemon.client()
    await client.join(root)
    client.root = ""  # the record is there
    await client.begin(2, nonce="n2")
    await client.slot(0, SHARD)
    await client.layout(0, SHARD)
    await client.whole_save(1, SHARD, attempt=str(AttemptId(2, 0)))
    await client.outcome(1)
    remade: list[str] = []
    daemon.hub.on_remade = remade.append
    [record] = daemon.hub.ranks_at(str(root))
    since = record.since
    old = await daemon.client()
    await old.join(root, world_size=2)
    old.root = ""
    await old.begin(1, nonce="n1")
    await old.send(wire.Look())
    if not surviving:
        refused = await old.refused()
        assert refused.code == "FencedError"
        assert "This job is start 1," in refused.message
    await old.next(wire.Joined)
    if goes == "closes":
        await old.send(wire.Leave())
        await old.send(wire.Look())
        await old.next(wire.Joined)
    old.close()
    await until(lambda: record.connections == 1)
    assert remade == []
    assert (record.start, record.begun, record.world_size, record.since) == (2, (2, "n2"), 1, since)
    assert not record.left_well
    assert [kept.nonce for kept in daemon.hub.tier.at(str(root), os.getuid())] == ["n2"]
    if surviving:
        assert not [message for message in old.heard if isinstance(message, wire.Refused)]
