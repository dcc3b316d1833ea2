"""What a client can make the daemon hold, and for how long it can hold the daemon: messages, layouts, trees, slots."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import socket
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from checkpointd.commit.machine import Phase
from checkpointd.config import ServeConfig
from checkpointd.daemon.accounts import Account
from checkpointd.daemon.memory.layouts import SLICE, KnownLayouts
from checkpointd.daemon.process.logs import TOLD_MAX
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.channel import FREE_BYTES, Channel
from checkpointd.daemon.protocol.parts import (
    PART_BYTES,
    contents_parts,
    layout_parts,
    report_parts,
    snapshot_of,
    snapshot_parts,
)
from checkpointd.daemon.service import ConnectionLimit
from checkpointd.daemon.status.model import JSON_BYTES_MAX, DaemonStatus
from checkpointd.errors import SidecarFullError, UsageError, WireError
from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias, Index
from checkpointd.layout.manifest import ErrorReport, Vote, WriterIdentity, encode
from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from tests.unit.daemon.conftest import (
    ADD_SEALS,
    SEALS,
    Daemon,
    RawClient,
    answered,
    empty_memfd,
    serving,
    shard_of,
    slot_bytes,
    slots_mapped,
    until,
)
from tests.unit.daemon.example_statuses import busy

SHARD = shard_of()
SIZE = slot_bytes(SHARD)
MANY = tuple(
    wire.WireTensor(f"model.layers.{i}.weight", "uint8", (1, 1), Box((0, 0), (1, 1)), "rank", 64 * i) for i in range(5000)
)
NBYTES = 5000 * 64 // 4096 * 4096 + 4096


# --- messages ----------------------------------------------------------------------------------------------------------


def frames(messages: list[wire.Message]) -> list[int]:
    """How long each is on the socket; WireError where one is too long for it."""
    return [len(wire.encode(message)) for message in messages]


def test_what_is_long_goes_in_parts_that_are_short() -> None:
    """WIRE-4"""
    held = wire.RetainedSnapshot(
        tag="t", attempt="00000001-0", step=1, order=(1, 0), world_size=1, nbytes=1, phase="staged", nonce="n"
    )
    aliases = tuple(Alias(f"alias.{i}", "owner", (2, 3), (3, 1), 0) for i in range(5000))
    excluded = tuple(f"excluded.{i}" for i in range(5000))
    tree, digests = os.urandom(300_000), tuple(os.urandom(16) for _ in MANY)
    parts = list(layout_parts(1, NBYTES, MANY))
    assert max(frames([*parts])) < 2 * PART_BYTES <= wire.FRAME_BYTES_MAX
    assert tuple(tensor for part in parts for tensor in part.tensors) == MANY
    assert [part.more for part in parts] == [True] * (len(parts) - 1) + [False]
    assert max(frames([*contents_parts(1, aliases, excluded, tree)])) < 2 * PART_BYTES
    whole = wire.Snapshot(held=held, nbytes=1, tensors=MANY, aliases=aliases, excluded=excluded, tree=tree, digests=digests)
    assert max(frames([*snapshot_parts(whole)])) < 2 * PART_BYTES
    assert snapshot_of(snapshot_parts(whole)) == whole
    status = "\N{GRINNING FACE}" * 100_000
    assert max(frames([*report_parts(status)])) < 2 * PART_BYTES
    assert "".join(part.status for part in report_parts(status)) == status
    assert [part.more for part in report_parts("")] == [False]
    assert [part.tensors for part in layout_parts(1, 4096, ())] == [()]


async def test_a_message_that_trickles_in_has_a_deadline_as_a_whole() -> None:
    """CHANNEL-4: each byte used to begin the patience anew."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    frame = wire.encode(wire.Report(status="x" * 1000))

    async def trickle() -> None:
        for at in range(len(frame)):
            theirs.send(frame[at : at + 1])
            await asyncio.sleep(0.001)

    trickling = asyncio.create_task(trickle())
    with pytest.raises(WireError, match=r"the rest did not within 0\.05 s"):
        await channel.receive(0.05)
    trickling.cancel()
    channel.close()
    theirs.close()


async def part_of_a_frame(daemon: Daemon, root: Path, rank: int) -> RawClient:
    """A client of which all of a long message but the last byte has come."""
    client = await daemon.client()
    await client.join(root, rank, 64)
    body = wire.HEAD.pack(wire.MAGIC, 0, 0, wire.FRAME_BYTES_MAX) + bytes(wire.FRAME_BYTES_MAX - 1)
    await asyncio.get_running_loop().sock_sendall(client.channel._socket, body)
    return client


async def test_what_has_come_of_messages_is_charged(root: Path) -> None:
    """CHANNEL-4: 24 connections once made it hold 1.6 GiB."""
    each = wire.FRAME_BYTES_MAX + wire.HEAD.size - 1 - FREE_BYTES
    async with serving(root.parent, memory_bytes_max=3 * each) as daemon:
        clients = [await part_of_a_frame(daemon, root, rank) for rank in range(3)]
        await until(lambda: daemon.hub.account.used == 3 * each)
        one_more = await part_of_a_frame(daemon, root, 3)
        refused = await one_more.refused()
        assert (refused.code, "no room for" in refused.message) == ("SidecarFullError", True)
        assert daemon.hub.account.used == 3 * each
        for client in clients:
            client.close()
        await until(lambda: daemon.hub.account.used == 0)


# --- layouts -----------------------------------------------------------------------------------------------------------


def test_a_layout_is_taken_in_by_short_steps() -> None:
    """However many tensors come, no step checks more than SLICE of them."""
    known, counts = KnownLayouts(Account(1 << 30)), []
    for part in layout_parts(1, NBYTES, MANY):
        for _ in known.add(part):
            coming = known._coming
            assert coming is not None
            counts.append(len(coming.tensors))
    steps = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert max(steps) <= SLICE
    found = known.get(1)
    assert found is not None
    assert len(found.tensors) == len(MANY)


@pytest.mark.parametrize(
    ("dimensions", "name"),
    [(0, "w"), (3, "model.layers.12.self_attn.q_proj.weight"), (64, "w"), (900, "\N{GRINNING FACE}" * 60)],
)
def test_what_is_charged_for_a_layout_is_no_less_than_it_takes(dimensions: int, name: str) -> None:
    """CHARGE-1: also for tensors of very many dimensions, each of which is an int of its own in a shape and twice in a box."""
    account = Account(1 << 40)
    known = KnownLayouts(account)
    shape, offsets = [1 << 40] * dimensions, [1 << 33] * dimensions
    sizes = [0, *[1 << 34] * (dimensions - 1)] if dimensions else []
    bodies = [
        msgspec.msgpack.encode(
            {
                "type": "layout",
                "layout": 1,
                "nbytes": 4096 * 64,
                "more": True,
                "tensors": [[f"{name}{k}", "uint8", shape, [offsets, sizes], "rank", 64 * k] for k in range(at, at + 4)],
            }
        )
        for at in range(0, 200, 4)
    ]
    tracemalloc.start()
    try:
        for body in bodies:
            for _ in known.add(wire.decode(body)):  # type: ignore[arg-type]  # a layout
                pass
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken <= account.used < 12 * taken
    known.clear()
    assert account.used == 0


def test_the_rest_of_a_layout_that_was_refused_is_no_layout() -> None:
    """Its last part alone would be a layout with tensors missing."""
    known = KnownLayouts(Account(1 << 30))
    tensors = (MANY[1], MANY[0], MANY[2])
    first, second, third = (wire.Layout(layout=1, nbytes=4096, tensors=(t,), more=t is not MANY[2]) for t in tensors)
    list(known.add(first))
    with pytest.raises(UsageError, match="overlaps the tensor before it"):
        list(known.add(second))
    list(known.add(third))
    assert known.get(1) is None
    list(known.add(third))  # a whole one, of the same number
    assert known.get(1) is not None


# --- snapshots ---------------------------------------------------------------------------------------------------------


async def announced(daemon: Daemon, root: Path, tree: bytes) -> RawClient:
    """Rank 1 of 2, which has announced a snapshot with this tree; the coordinator never comes."""
    client = await daemon.client()
    await client.ready(root, SHARD, rank=1, world_size=2)
    await client.save(1)
    for part in contents_parts(1, (), (), tree):
        await client.send(part)
    await client.send(wire.Announced(save=1, slot=0, layout=0, mark=1))
    await answered(client)
    return client


async def test_the_tree_of_a_save_is_charged_until_its_process_died(root: Path, store: PosixStore) -> None:
    """Also while its connection is closed; then nothing of it is left, though the attempt goes on."""
    tree = bytes(1 << 20)
    async with serving(root.parent, held_bytes_max=0, grace_s=0.0) as daemon:
        client = await announced(daemon, root, tree)
        assert daemon.hub.account.used > SIZE + len(tree)
        client.close()
        await until(lambda: daemon.hub.clients == 0)
        assert daemon.hub.account.used > SIZE + len(tree)
        (job,) = daemon.hub.jobs.all()
        job.client_left(1)
        await until(lambda: len(daemon.hub.memory) == 0)
        await until(lambda: daemon.hub.memory.release_lingering() == 0 and daemon.hub.account.used == 0)
        assert daemon.hub.jobs.all() == [job]
        assert job.phase is Phase.FAILING


async def test_a_tree_that_does_not_fit_fails_its_save_alone(root: Path, store: PosixStore) -> None:
    async with serving(root.parent, memory_bytes_max=SIZE + (1 << 18), held_bytes_max=0, grace_s=0.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.save(1)
        for part in contents_parts(1, (), (), bytes(1 << 20)):
            await client.send(part)
        assert "is in use" in (await client.refused()).message
        assert (await client.outcome(1)).phase == "failed"
        await answered(client)


def trees() -> int:
    """Indexes in this process that hold a tree."""
    gc.collect()
    return sum(bool(thing.tree) for thing in gc.get_objects() if type(thing) is Index)


@pytest.mark.nightly
async def test_a_slot_whose_shard_is_stored_is_not_kept(root: Path, store: PosixStore) -> None:
    """Four dead trainers once kept 1 GiB mapped that was charged to nobody: rank 0 never came, so their attempts went on."""
    before = trees()
    async with serving(root.parent, held_bytes_max=0, grace_s=0.0) as daemon:
        client = await announced(daemon, root, SHARD.tree)
        await client.send(wire.Staged(save=1))
        await client.phase(1, Phase.PREPARED)
        client.close()
        await until(lambda: len(daemon.hub.memory) == 0)
        await until(lambda: slots_mapped() == 0)
        daemon.hub.memory.settle()
        assert daemon.hub.account.used == 0
        assert [job.phase for job in daemon.hub.jobs.all()] == [Phase.PREPARED]
        assert trees() <= before


async def test_a_snapshot_with_a_hole_is_not_read(root: Path, store: PosixStore) -> None:
    """SLOTMAP-5: its pages would be allocated by the daemon's reads, and could get it killed."""
    descriptor = empty_memfd()
    os.ftruncate(descriptor, SIZE)
    fcntl.fcntl(descriptor, ADD_SEALS, SEALS)
    async with serving(root.parent) as daemon:
        client = await daemon.client()
        await client.join(root)
        await client.begin(1)
        await client.send(wire.Slot(slot=0, nbytes=SIZE), descriptor)
        await client.layout(0, SHARD)
        await client.whole_save(1, SHARD)
        refused = await client.next(wire.Refused)
        assert (refused.save, "has a hole at byte 0" in refused.error.message) == (1, True)
        assert (await client.outcome(1)).phase == "failed"
        assert os.fstat(descriptor).st_blocks == 0
    os.close(descriptor)


# --- shares ------------------------------------------------------------------------------------------------------------


def test_one_user_of_several_leaves_room_for_the_others() -> None:
    """SERVICE-4"""
    alone = ServeConfig(socket="/s", roots=("/r",), uids=(1,), clients_max=9, memory_bytes_max=100)
    assert (alone.user_clients, alone.user_bytes) == (9, 100)
    two = ServeConfig(socket="/s", roots=("/r",), uids=(1, 2), clients_max=9, memory_bytes_max=100)
    assert (two.user_clients, two.user_bytes) == (5, 50)
    given = ServeConfig(socket="/s", roots=("/r",), uids=(1, 2), user_clients_max=7, user_bytes_max=1 << 40, memory_bytes_max=9)
    assert (given.user_clients, given.user_bytes) == (7, 9)
    places = ConnectionLimit("ranks", "raise it", 3, 2)
    places.take(1)
    places.take(1)
    with pytest.raises(SidecarFullError, match=r"user 1 has taken its share of the connections for ranks \(2 of 3\)"):
        places.take(1)
    places.take(2)
    with pytest.raises(SidecarFullError, match=r"all connections for ranks are taken \(3\)"):
        places.take(2)
    places.give_back(1)
    places.take(2)


async def test_trainers_leave_room_for_those_who_ask_for_the_status(root: Path) -> None:
    """SERVICE-4: a probe that is turned away would end a daemon that is only full."""
    async with serving(root.parent, clients_max=1) as daemon:
        await daemon.client()
        probe = await daemon.client("status")
        await probe.send(wire.Query())
        await probe.next(wire.Report)


# --- what is told ------------------------------------------------------------------------------------------------------


async def test_the_long_reasons_of_other_ranks_do_not_make_the_status_too_long(root: Path, store: PosixStore) -> None:
    """Five votes of 15 MiB once broke `status --socket`, which probes use."""
    async with serving(root.parent) as daemon:
        for number in range(1, 4):
            vote = Vote(
                tag=f"global_step{number}",
                attempt="00000001-0",
                rank=1,
                world_size=2,
                step=number,
                n=number,
                save_latest=True,
                vote="no",
                error=ErrorReport(code="StoreError", message="\N{LATIN SMALL LETTER U WITH DIAERESIS}" * (1 << 20)),
                writer=WriterIdentity(host="h", pid=1, time="t"),
            )
            client = await daemon.client()
            await client.ready(root, SHARD, world_size=2)
            await client.save(number)
            while vote.prefix not in (await root_view.state_of(store)).attempts:
                await asyncio.sleep(0.01)
            await store.put(f"{vote.prefix}/00001.vote", encode(vote))
            ended = await client.outcome(number)
            assert ended.error is not None
            assert len(ended.error.message) < 2 * TOLD_MAX
            client.close()
        probe = await daemon.client("status")
        await probe.send(wire.Query())
        assert len((await probe.next(wire.Report)).status) < PART_BYTES


def test_a_status_that_would_be_too_long_says_what_it_leaves_out() -> None:
    """However many roots and saves there are."""
    status = busy(64, saves=64)
    assert status.left_out == ()
    assert len(msgspec.json.encode(status)) > 1 << 20
    many = msgspec.structs.replace(status, roots=status.roots * 12)
    shown = many.to_json()
    assert len(shown) <= JSON_BYTES_MAX
    told = msgspec.json.decode(shown, type=DaemonStatus)
    [words] = told.left_out
    assert "of each root" in words or "roots" in words
    bare = tuple(msgspec.structs.replace(root, recent=(), checkpoints=()) for root in status.roots)
    huge = msgspec.structs.replace(status, roots=bare * 300)
    told = msgspec.json.decode(huge.to_json(), type=DaemonStatus)
    [words] = told.left_out
    assert f"of {len(huge.roots)} roots" in words
