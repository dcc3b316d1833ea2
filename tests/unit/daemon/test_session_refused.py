"""Saves over the socket: what is refused, and clients that do not behave."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.daemon import session as session_module
from checkpointd.daemon.process import logs
from checkpointd.daemon.protocol import wire
from checkpointd.layout.manifest import ErrorReport
from checkpointd.store.posix.store import PosixStore
from tests.builders import HeldPersist, make_shard, rank_arrays
from tests.unit.daemon.conftest import (
    Daemon,
    RawClient,
    answered,
    open_descriptors,
    sealed_memfd,
    serving,
    shard_of,
    slot_bytes,
    slot_bytes_charged,
    slots_open,
    until,
)

SHARD = shard_of()
IMAGE = len(SHARD.buffer)
SIZE = slot_bytes(SHARD)


# --- what is refused ---------------------------------------------------------------------------------------------------


async def test_slots_that_are_refused(daemon: Daemon, root: Path) -> None:
    """SLOTMAP-1: each with a reason, and none of them ends the connection."""
    client = await daemon.client()
    await client.join(root)
    before = {one for one in open_descriptors() if "socket" not in one}
    for descriptor, nbytes, why in (
        (sealed_memfd(bytes(SIZE), 0), SIZE, "sealed"),
        (sealed_memfd(bytes(SIZE)), SIZE + 4096, "were announced"),
        (os.open("/dev/null", os.O_RDONLY), SIZE, "must be a memfd"),
    ):
        await client.send(wire.Slot(slot=0, nbytes=nbytes), descriptor)
        os.close(descriptor)
        assert why in (await client.refused()).message
    await client.send(wire.Slot(slot=0, nbytes=SIZE))
    assert "takes a descriptor" in (await client.refused()).message
    assert daemon.hub.account.used == 0
    assert {one for one in open_descriptors() if "socket" not in one} <= before
    await client.slot(0, SHARD)
    await client.slot(0, SHARD)
    assert "is there already" in (await client.refused()).message
    await answered(client)


async def test_too_many_slots(root: Path) -> None:
    """SESSION-3"""
    async with serving(root.parent, slots_max=2) as daemon:
        client = await daemon.client()
        assert client.welcome.slots_max == 2
        await client.join(root)
        for number in range(3):
            await client.slot(number, SHARD)
        assert "has 2 slots already" in (await client.refused()).message
        await client.send(wire.DropSlot(slot=0))
        await client.slot(2, SHARD)
        await answered(client)
        assert slot_bytes_charged(daemon) == 2 * SIZE


async def test_more_memory_than_a_user_may_have(root: Path) -> None:
    """SLOTMAP-3, SESSION-3: on however many connections."""
    async with serving(root.parent, user_bytes_max=2 * SIZE, memory_bytes_max=9 * SIZE) as daemon:
        first, second = await daemon.client(), await daemon.client()
        await first.join(root, 0, 2)
        await second.join(root, 1, 2)
        for number in range(2):
            await first.slot(number, SHARD)
        await answered(first)
        for client in (first, second):
            await client.slot(2, SHARD)
            refused = await client.refused()
            assert refused.code == "SidecarFullError"
            assert f"user {os.getuid()} may use 40.0 KiB, of which 40.0 KiB is in use" in refused.message
        first.close()
        await until(lambda: slot_bytes_charged(daemon) == 0)
        await second.slot(1, SHARD)
        await answered(second)
        assert slot_bytes_charged(daemon) == SIZE


async def test_layouts_that_are_refused(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    outside = make_shard({"w": rank_arrays(0)["model.weight"]})
    bad = wire.WireTensor("w", "float32", (64, 48), outside.tensors[0].box, "rank", 4096 * 3)
    await client.send(wire.Layout(layout=0, nbytes=len(outside.buffer), tensors=(bad,)))
    assert "end at byte" in (await client.refused()).message
    await answered(client)


async def test_a_layout_that_is_larger_than_the_slot(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """The save ends with it, instead of waiting for a snapshot that will not come."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.send(wire.Layout(layout=1, nbytes=IMAGE + 4096, tensors=()))
    await client.whole_save(1, SHARD, layout=1)
    assert f"needs {IMAGE + 4096} bytes and a page, and the slot has {SIZE}" in (await client.refused()).message
    ended = await client.outcome(1)
    assert ended.phase == "failed"
    assert ended.error is not None
    assert "the slot has" in ended.error.message


@pytest.mark.parametrize(("slot", "layout"), [(3, 0), (0, 3)])
async def test_a_snapshot_in_a_slot_or_layout_that_is_not_there(
    daemon: Daemon, store: PosixStore, root: Path, slot: int, layout: int
) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD, slot=slot, layout=layout)
    refused = await client.next(wire.Refused)
    assert (refused.save, "there is no" in refused.error.message) == (1, True)
    assert (await client.outcome(1)).phase == "failed"


async def test_the_newest_four_layouts_are_kept(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """SESSION-3"""
    client = await daemon.client()
    await client.ready(root, SHARD)
    for number in range(1, 5):
        await client.layout(number, SHARD)
    await client.whole_save(1, SHARD, layout=0)
    assert "no layout 0" in (await client.refused()).message
    await client.whole_save(2, SHARD, layout=1)
    assert (await client.outcome(2)).phase == "committed"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"attempt": "00000002-0"}, "is not an attempt of start 1"),
        ({"attempt": "1-0"}, "is not an attempt of start 1"),
        ({"attempt": "../../etc"}, "is not an attempt of start 1"),
        ({"attempt": ""}, "is not an attempt of start 1"),
        ({"tag": ".."}, "cannot be used"),
        ({"tag": "a/b"}, "cannot be used"),
        ({"tag": ""}, "cannot be used"),
        ({"tag": "latest"}, "cannot be used"),
        ({"tag": ".checkpointd"}, "cannot be used"),
        ({"tag": "a\x1b[31mb"}, "cannot be used"),
    ],
)
async def test_saves_that_are_refused(
    daemon: Daemon, store: PosixStore, root: Path, options: dict[str, object], why: str
) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1, **options)
    refused = await client.next(wire.Refused)
    assert (refused.save, why in refused.error.message) == (1, True)
    assert len(daemon.hub.jobs) == 0
    await answered(client)


async def test_what_does_not_belong_there_yet_or_at_all(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    for message, why in (
        (wire.Look(), "join a root first"),
        (wire.Leave(), "join a root first"),
        (wire.Fetch(tag="t", attempt="00000001-0"), "join a root first"),
        (wire.Layout(layout=0, nbytes=4096, tensors=()), "join a root first"),
        (wire.Join(root=str(root), rank=2, world_size=2), "rank 2 does not exist"),
        (wire.Join(root="/etc", rank=0, world_size=1), "does not serve"),
        (wire.Join(root=f"{root}/../..", rank=0, world_size=1), "'..'"),
        (wire.DropSlot(slot=1), "there is no slot 1"),
        (wire.Spoiled(save=1, error=ErrorReport(code="x", message="y")), "there is no save 1"),
        (wire.Staged(save=1), "there is no save 1"),
        (wire.Announced(save=1, slot=0, layout=0, mark=1), "there is no save 1"),
        (wire.Contents(save=1), "there is no save 1"),
        (wire.Hello(protocols=(1, 1), release="x"), "does not belong here"),
        (wire.Free(slot=0), "does not belong here"),
        (wire.Query(), "does not belong here"),
    ):
        await client.send(message)
        assert why in (await client.refused()).message
    await client.save(1)
    assert "send begin first" in (await client.refused()).message
    await client.join(root)
    await client.send(wire.Join(root=str(root), rank=0, world_size=1))
    assert "has joined a root already" in (await client.refused()).message
    assert daemon.hub.refused == 17


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"compression": "pickle"}, "knows auto, none, zstd, planes"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_bytes": 1 << 40}, "chunk_bytes is"),
        ({"budget_bytes": 0}, "budget_bytes is 1"),
        ({"commit_timeout_s": 0.0}, "timeout_s is 0.0"),
    ],
)
async def test_settings_that_are_refused(daemon: Daemon, root: Path, options: dict[str, object], why: str) -> None:
    client = await daemon.client()
    await client.join(root)
    await client.begin(1, **options)
    assert why in (await client.refused()).message
    await answered(client)


async def test_a_descriptor_that_a_message_does_not_take_is_closed(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    before = open_descriptors()
    descriptor = os.open("/dev/null", os.O_RDONLY)
    await client.send(wire.Ping(), descriptor)
    os.close(descriptor)
    assert "a Ping message takes no descriptor" in (await client.refused()).message
    assert open_descriptors() <= before
    await answered(client)


async def test_too_many_saves_on_one_connection(root: Path, store: PosixStore) -> None:
    """SESSION-3"""
    async with serving(root.parent, saves_max=2, grace_s=0.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        for number in range(1, 4):
            await client.save(number)
        assert "2 saves of this client are in flight already" in (await client.refused()).message
        assert len(daemon.hub.jobs) == 2


async def test_saves_that_only_wait_for_other_ranks_keep_no_new_one_out(
    root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their snapshots are stored: a trainer that saves often, while another rank is late, is not turned away."""
    monkeypatch.setattr(session_module, "VOTED_MAX", 6)
    async with serving(root.parent, saves_max=2, grace_s=0.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD, world_size=2)
        for number in range(1, 7):
            await client.whole_save(number, SHARD)
            await client.phase(number, Phase.PREPARED)
        await client.save(7)
        assert "6 saves of this client are in flight already" in (await client.refused()).message


async def test_too_many_saves_on_ever_new_connections(root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """SESSION-3"""
    HeldPersist(monkeypatch)
    async with serving(root.parent, saves_max=2, grace_s=0.0) as daemon:
        refused = 0
        for number in range(1, 8):
            client = await daemon.client()
            await client.ready(root, SHARD)
            await client.whole_save(number, SHARD)
            await answered(client)
            refused += any(isinstance(message, wire.Refused) for message in client.heard)
            client.close()
        assert (refused, len(daemon.hub.jobs)) == (3, 4)


async def test_the_same_number_twice(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.save(1, tag="other")
    assert "save 1 is there already" in (await client.refused()).message
    await client.staged(1, SHARD)
    assert (await client.outcome(1)).phase == "committed"


async def test_one_attempt_under_two_numbers(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """SAVEJOB-1"""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.save(2, tag="global_step1", step=1, n=1)
    assert "was begun already" in (await client.refused()).message
    await client.staged(1, SHARD)
    assert (await client.outcome(1)).phase == "committed"


async def test_a_clients_words_do_not_make_lines_in_the_log(
    daemon: Daemon, store: PosixStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "checkpointd")
    client = await daemon.client()
    await client.ready(root, SHARD)
    evil = "x\nERROR all is lost\x1b[2J" + "y" * 20_000
    await client.send(
        wire.Layout(layout=5, nbytes=4096, tensors=(wire.WireTensor(evil, "z", (), SHARD.tensors[0].box, "rank", 0),))
    )
    assert len((await client.refused()).message) < logs.TOLD_MAX + 100
    await client.save(1)
    await client.send(wire.Spoiled(save=1, error=ErrorReport(code=evil, message=evil)))
    ended = await client.outcome(1)
    assert ended.error is not None
    assert len(ended.error.message) < 2 * logs.TOLD_MAX
    assert all("\n" not in record.getMessage() and "\x1b" not in record.getMessage() for record in caplog.records)
    assert all(len(record.getMessage()) < 3 * logs.TOLD_MAX for record in caplog.records)


# --- clients that do not behave ----------------------------------------------------------------------------------------


async def ask_for_ever(client: RawClient, question: wire.Message) -> None:
    while True:
        await client.send(question)


async def test_a_client_that_does_not_read_is_left(daemon: Daemon, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SESSION-2: and the others are served."""
    deaf, other = await daemon.client(), await daemon.client()
    questions = asyncio.create_task(ask_for_ever(deaf, wire.Fetch(tag="t" * 4000, attempt="00000001-0")))
    await until(lambda: daemon.hub.clients == 1)
    await answered(other)
    with pytest.raises(ConnectionError):
        await questions
    assert sum("does not read" in record.getMessage() for record in caplog.records) == 1


async def test_a_client_that_asks_for_its_snapshot_again_and_again_and_does_not_read(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """SESSION-2, SESSION-3: at most one answer is made for it, and no descriptor waits."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    other = await daemon.client()
    before = slots_open()
    questions = asyncio.create_task(ask_for_ever(client, wire.Fetch(tag="global_step1", attempt="00000001-0")))
    await until(lambda: bool(client.channel._waits))  # the daemon reads no more of them
    await answered(other)
    assert slots_open() <= before
    questions.cancel()
    client.close()
    await until(lambda: daemon.hub.clients == 1)


async def test_half_a_message_is_waited_for_only_so_long(daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "FRAME_S", 0.01)
    client = await daemon.client()
    client.channel._socket.send(wire.encode(wire.Ping())[:-1])
    assert "half a message came" in (await client.refused()).message
    await client.ended()


async def test_a_defect_ends_one_connection_and_no_other(
    daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SESSION-1"""
    other, client = await daemon.client(), await daemon.client()

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(session_module.RankSession, "_drop_slot", broken)
    await client.send(wire.DropSlot(slot=0))
    await client.ended()
    assert "unforeseen" in caplog.text
    await answered(other)


async def test_a_defect_of_the_writer_ends_the_save_and_frees_the_client(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SESSION-4"""

    async def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("checkpointd.pipeline.attempt.point_latest", broken)
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    ended = await client.outcome(1)
    assert ended.error is not None
    assert (ended.phase, "please report it" in ended.error.message) == ("failed", True)
    await until(lambda: len(daemon.hub.jobs) == 0)
