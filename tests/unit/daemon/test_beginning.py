"""What a client says of its start is believed when the store shows it; a storage that cannot tell now refuses nobody."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
from pathlib import Path

import pytest

from checkpointd.daemon.protocol import wire
from checkpointd.errors import RootGoneError, StoreError, UnreadableError
from checkpointd.layout.keys import LOG, AttemptId
from checkpointd.layout.log_records import entry_key
from checkpointd.pipeline import root_id
from checkpointd.pipeline.root import own_root, root_view
from checkpointd.pipeline.writer_state import WriterState
from checkpointd.store.base import Entry
from checkpointd.store.posix.store import PosixStore
from tests.unit.daemon import conftest
from tests.unit.daemon.conftest import N1, N2, Daemon, RawClient, put_start, shard_of, until

SHARD = shard_of()
RECORD = entry_key(1)


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
    await begin_unseen(client, N2 if shown == "another nonce" else N1)
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
    await begin_unseen(client, N2)
    assert (await client.refused()).code == "RootGoneError"
    await client.send(wire.Look())
    assert [held.nonce for held in (await client.next(wire.Joined)).held] == [N1]
    assert remade == []
    await client.slot(1, SHARD)
    await client.whole_save(2, SHARD, slot=1)
    assert (await client.outcome(2)).phase == "committed"


@pytest.mark.parametrize("how", ["fails", "hangs"])
async def test_a_storage_that_cannot_tell_now_refuses_nobody(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Its saves look again before they vote."""
    works, listed = asyncio.Event(), PosixStore.list

    async def troubled(self: PosixStore, prefix: str) -> list[Entry]:
        if prefix == LOG and not works.is_set():
            if how == "fails":
                raise UnreadableError("EIO")
            await works.wait()
        return await listed(self, prefix)

    async def begun_already(*_: object) -> None:
        """Its start is there, and the storage would not answer."""

    monkeypatch.setattr(conftest, "put_start", begun_already)
    monkeypatch.setattr(PosixStore, "list", troubled)
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

    async def begun_already(*_: object) -> None:
        """Its start is there, and the storage would not answer."""

    identity = PosixStore.identity
    monkeypatch.setattr(conftest, "put_start", begun_already)
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
    await put_start(store, 2, N2, surviving)
    client = await daemon.client()
    await client.join(root)
    client.root = ""  # the record is there
    await client.begin(2, nonce=N2)
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
    await old.begin(1, nonce=N1)
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
    assert (record.start, record.begun, record.world_size, record.since) == (2, (2, N2), 1, since)
    assert not record.left_well
    assert [kept.nonce for kept in daemon.hub.tier.at(str(root), os.getuid())] == [N2]
    if surviving:
        assert not [message for message in old.heard if isinstance(message, wire.Refused)]


async def test_a_job_that_has_ended_keeps_nobody_from_reading_what_lies_at_its_path_now(
    store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later jobs, and the looks of the daemon, use the same store."""
    monkeypatch.setattr(root_id, "ABSENCE_S", 0.05)
    ended = WriterState(store=store)
    await ended.own_root.begun(1, N1)
    shutil.rmtree(root)
    async with PosixStore(root) as again:
        await put_start(again, 1, N2)
    with pytest.raises(RootGoneError):
        await root_view.state_of(store)
    del ended
    gc.collect()
    begin = (await root_view.state_of(store)).begin
    assert begin is not None
    assert begin.nonce == N2
