"""Saves over the socket: from the hand-over to the commit, broken connections, dead clients, and what is refused."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from checkpointd.codec.checksum import xxh3_128
from checkpointd.commit.machine import Phase
from checkpointd.daemon import session as session_module
from checkpointd.daemon import wire
from checkpointd.daemon.layouts import wire_tensors
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline import catalog
from checkpointd.store.posix import PosixStore
from tests.builders import HeldPersist, begin_epoch, load_arrays, make_shard, plan_save, rank_arrays
from tests.unit.daemon.conftest import (
    Daemon,
    RawClient,
    open_descriptors,
    sealed_memfd,
    serving,
    shard_of,
    slot_bytes,
    slot_of,
    slots_mapped,
    until,
)

SHARD = shard_of()
IMAGE = len(SHARD.image)
SIZE = slot_bytes(SHARD)


def expected(seed: int = 0) -> dict[str, bytes]:
    return {fqn: array.tobytes() for fqn, array in rank_arrays(seed).items()}


async def voted(store: PosixStore, tag: str) -> list[str]:
    return [entry.name for entry in await store.list(f"{tag}/00000001-0")]


# --- the way it should go ----------------------------------------------------------------------------------------------


async def test_a_save_is_committed_and_reads_back_bit_for_bit(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    assert await client.ready(root, SHARD) == wire.Joined(held=(), in_flight=())
    await client.whole_save(1, SHARD)
    ended = await client.outcome(1)
    assert (ended.phase, ended.error) == ("committed", None)
    assert await load_arrays(store, "global_step1", 0) == expected()
    assert (root / "latest").read_text() == "global_step1\n"
    checkpoint = await catalog.find(store, "global_step1")
    assert checkpoint.outcome.step == 1


async def test_the_phases_come_in_order_and_the_bytes_with_them(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    assert (await client.next(wire.Phase)).phase == "staging"
    await client.staged(1, SHARD)
    phases = [(await client.next(wire.Phase)).phase for _ in range(4)]
    assert phases == ["staged", "persisting", "prepared", "committed"]
    progress = [message for message in client.heard if isinstance(message, wire.Progress)]
    assert progress[-1].raw_done == progress[-1].raw_total == sum(map(len, expected().values()))
    assert progress[-1].stored > 0


async def test_ranks_on_connections_of_their_own_commit_together(daemon: Daemon, store: PosixStore, root: Path) -> None:
    clients = [await daemon.client() for _ in range(3)]
    for rank, client in enumerate(clients):
        await client.ready(root, shard_of(rank), rank=rank, world_size=3)
    for rank, client in enumerate(clients):
        await client.whole_save(1, shard_of(rank))
    assert [(await client.outcome(1)).phase for client in clients] == ["committed"] * 3
    for rank in range(3):
        assert await load_arrays(store, "global_step1", rank) == expected(rank)


async def test_one_layout_serves_many_saves(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.slot(1, SHARD)
    for number in range(1, 6):
        await client.whole_save(number, SHARD, slot=number % 2)
        assert (await client.outcome(number)).phase == "committed"
        if number > 1:
            assert (await client.next(wire.Free)).slot == (number - 1) % 2


async def test_whose_votes_are_missing_is_told_when_the_bytes_are_long_there(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD, world_size=3)
    await client.whole_save(1, SHARD)
    await client.phase(1, Phase.PREPARED)
    await client.next(wire.Progress, lambda m: m.votes_missing == (1, 2))
    others = await plan_save(store, epoch=1, world_size=3, tag="global_step1", n=1)
    await others.vote(2)
    await client.next(wire.Progress, lambda m: m.votes_missing == (1,))
    await others.vote(1)
    assert (await client.outcome(1)).phase == "committed"


async def test_a_skipped_save_says_so(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.send(wire.Spoiled(save=1, error=ErrorReport(code="SkippedError", message="busy")))
    assert (await client.outcome(1)).phase == "skipped"


async def test_a_deadline_names_the_ranks_that_are_missing(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD, world_size=3)
    await client.whole_save(1, SHARD, left_s=0.0)
    ended = await client.outcome(1)
    assert ended.error is not None
    assert (ended.phase, ended.error.code) == ("aborted", "DeadlineError")
    assert set(ended.ranks) >= {1, 2}


async def test_who_pings_is_answered(daemon: Daemon) -> None:
    client = await daemon.client()
    await client.send(wire.Ping())
    await client.next(wire.Pong)


# --- connections that break, clients that die ------------------------------------------------------------------------


async def test_a_client_that_comes_back_is_attached_to_its_save(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """J1"""
    held = HeldPersist(monkeypatch)
    first = await daemon.client()
    await first.ready(root, SHARD)
    await first.whole_save(1, SHARD)
    await first.phase(1, Phase.PERSISTING)
    first.close()
    second = await daemon.client()
    joined = await second.ready(root, SHARD)
    (known,) = joined.in_flight
    assert (known.tag, known.attempt, known.rank, known.phase) == ("global_step1", "00000001-0", 0, "persisting")
    await second.save(7, tag="global_step1", step=1, n=1, hand=1)
    assert (await second.next(wire.Phase)).phase == "persisting"
    assert len(daemon.hub.jobs) == 1
    held.go.set()
    assert (await second.outcome(7)).phase == "committed"
    assert await load_arrays(store, "global_step1", 0) == expected()


async def test_a_client_that_comes_back_late_hears_how_its_save_ended(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """Y4: and what it still says of that save is no error."""
    first = await daemon.client()
    await first.ready(root, SHARD)
    await first.whole_save(1, SHARD)
    await first.outcome(1)
    await until(lambda: len(daemon.hub.jobs) == 0)
    first.close()
    second = await daemon.client()
    await second.ready(root, SHARD)
    await second.whole_save(9, SHARD, tag="global_step1", step=1, n=1, hand=1)
    assert (await second.outcome(9)).phase == "committed"
    await second.next(wire.Free)
    assert not [message for message in second.heard if isinstance(message, wire.Refused)]


async def test_a_snapshot_may_be_finished_on_another_connection(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """The connection broke while it was being taken; its process lives."""
    first = await daemon.client()
    await first.ready(root, SHARD)
    await first.save(1)
    await first.phase(1, Phase.STAGING)
    first.close()
    await until(lambda: daemon.hub.clients == 0)
    second = await daemon.client()
    await second.ready(root, SHARD)
    await second.whole_save(5, SHARD, tag="global_step1", step=1, n=1)
    assert (await second.outcome(5)).phase == "committed"
    assert await load_arrays(store, "global_step1", 0) == expected()


async def test_a_slot_that_is_still_read_is_not_free_because_it_came_again(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4, J3: the job of the first connection reads the same memory."""
    held = HeldPersist(monkeypatch)
    descriptor = slot_of(SHARD)
    clients = []
    for number in (1, 2):
        client = await daemon.client()
        clients.append(client)
        await client.join(root)
        await client.begin(1)
        await client.send(wire.Slot(slot=number, nbytes=SIZE), descriptor)
        await client.layout(0, SHARD)
        await client.whole_save(number, SHARD, slot=number, tag="global_step1", step=1, n=1)
        await client.phase(number, Phase.PERSISTING)
    os.close(descriptor)
    await clients[1].send(wire.Ping())
    await clients[1].next(wire.Pong)
    assert not [message for client in clients for message in client.heard if isinstance(message, wire.Free)]
    assert daemon.hub.account.used == SIZE
    await clients[1].send(wire.Leave())
    held.go.set()
    for number, client in enumerate(clients, 1):
        assert (await client.outcome(number)).phase == "committed"
        assert (await client.next(wire.Free)).slot == number


async def test_a_snapshot_that_is_announced_again_does_not_free_its_slot(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """J3: the client would write the next one over it."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.announced(1, SHARD)
    await client.announced(1, SHARD)
    await answered(client)
    assert not [message for message in client.heard if isinstance(message, wire.Free | wire.Refused)]
    await client.send(wire.Staged(save=1))
    assert (await client.outcome(1)).phase == "committed"


async def test_a_snapshot_that_was_not_announced(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.send(wire.Staged(save=1))
    assert "announce the snapshot" in (await client.refused()).message
    assert (await client.outcome(1)).phase == "failed"


async def test_the_slot_of_a_snapshot_that_was_announced_and_spoiled_is_free(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.announced(1, SHARD)
    await client.send(wire.Spoiled(save=1, error=ErrorReport(code="StagingError", message="torn")))
    assert (await client.outcome(1)).phase == "failed"
    assert (await client.next(wire.Free)).slot == 0


async def test_what_a_client_said_before_it_died_is_heard_though_it_cannot_be_answered(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """J2: the snapshot was whole, and its client said so; that nobody reads the answers changes nothing."""
    client = await daemon.client()
    frames = [
        wire.Join(root=str(root), rank=0, world_size=1),
        wire.Begin(epoch=1, nonce="n", compression="none", chunk_bytes=4096, budget_bytes=1 << 26, commit_timeout_s=60.0),
        *[wire.Look()] * 20,
    ]
    client.channel._socket.setblocking(True)
    for message in frames:
        client.channel._socket.sendall(wire.encode(message))
    descriptor = slot_of(SHARD)
    socket.send_fds(client.channel._socket, [wire.encode(wire.Slot(slot=0, nbytes=SIZE), 1)], [descriptor])
    os.close(descriptor)
    save = wire.Save(save=1, tag="t", attempt="00000001-0", step=1, n=1, save_latest=True, hand=0, left_s=60.0)
    announced = wire.Announced(save=1, slot=0, layout=0, mark=1, aliases=(), excluded=(), tree=SHARD.tree)
    layout = wire.Layout(layout=0, nbytes=IMAGE, tensors=wire_tensors(SHARD.tensors))
    for last in (layout, save, announced, wire.Staged(save=1)):
        client.channel._socket.sendall(wire.encode(last))
    client.close()
    await until(lambda: bool(daemon.hub.jobs.ended_at(str(root))))
    (ended,) = daemon.hub.jobs.ended_at(str(root))
    assert ended.phase is Phase.COMMITTED


async def start_child(daemon: Daemon, root: Path, *how: str) -> asyncio.subprocess.Process:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.daemon.client_child", daemon.path, str(root), *how),
        cwd=Path(__file__).parents[3],
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdout is not None
    assert await child.stdout.readline() == b"ready\n"
    return child


async def end_of(child: asyncio.subprocess.Process) -> None:
    """Return when it is gone, with the child that it may have."""
    assert child.stdin is not None
    child.stdin.close()
    await child.communicate()


@pytest.mark.parametrize("how", [(), ("forking",)], ids=["alone", "with a child that holds the connection"])
async def test_a_client_that_dies_before_its_snapshot_is_whole(
    daemon: Daemon, store: PosixStore, root: Path, how: tuple[str, ...]
) -> None:
    """J2: the daemon votes no at once, long before the deadline."""
    child = await start_child(daemon, root, *how)
    await until(lambda: len(daemon.hub.jobs) == 1)
    child.kill()
    await until(lambda: len(daemon.hub.jobs) == 0)
    (ended,) = daemon.hub.jobs.ended_at(str(root))
    assert ended.phase is Phase.FAILED
    assert "ended while its snapshot was being taken" in ended.error.message
    assert f"process {child.pid}" in ended.error.message
    await until(lambda: daemon.hub.clients == 0)
    await end_of(child)


@pytest.mark.parametrize("how", ["staged", "marked"])
async def test_a_client_that_dies_once_its_snapshot_is_whole(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """J2, J3, E2: nothing of it is needed any more, not even its word."""
    held = HeldPersist(monkeypatch)
    child = await start_child(daemon, root, how)
    child.kill()
    await end_of(child)
    await until(lambda: daemon.hub.clients == 0)
    await until(lambda: [job.phase for job in daemon.hub.jobs.all()] == [Phase.PERSISTING])
    assert daemon.hub.tier.of(str(root), 0) is not None
    held.go.set()
    await until(lambda: len(daemon.hub.jobs) == 0)
    assert await load_arrays(store, "global_step1", 0) == expected()


async def test_a_client_that_hangs_up_with_its_snapshot_not_whole_but_lives(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """J2: only its death spoils the snapshot; and the deadline, which it gave."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.phase(1, Phase.STAGING)
    client.close()
    await until(lambda: daemon.hub.clients == 0)
    (job,) = daemon.hub.jobs.all()
    assert not job.has_snapshot
    await job.attempt._store.list("")  # a turn of the loop and more
    assert job.phase is Phase.STAGING
    job.spoiled(RuntimeError("the test has seen enough"))
    await until(lambda: len(daemon.hub.jobs) == 0)


async def test_an_attempt_that_is_over_before_the_snapshot_is_whole(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """Y4: the job ends, the late snapshot is no error, and its slot is free at once."""
    client = await daemon.client()
    await client.ready(root, SHARD, world_size=2)
    await client.save(1)
    other = await plan_save(store, epoch=1, tag="global_step1", n=1, failing={1: RuntimeError("no")})
    await other.vote(1)
    assert (await client.outcome(1)).phase == "aborted"
    await until(lambda: len(daemon.hub.jobs) == 0)
    await client.staged(1, SHARD)
    await client.next(wire.Free)
    await client.send(wire.Spoiled(save=1, error=ErrorReport(code="StagingError", message="late")))
    await client.send(wire.Ping())
    await client.next(wire.Pong)
    assert not [message for message in client.heard if isinstance(message, wire.Refused)]


# --- what is left behind -----------------------------------------------------------------------------------------------


async def test_nothing_stays_mapped_or_open_after_the_last_client(tmp_path: Path, store: PosixStore, root: Path) -> None:
    """E2, J4: what is remembered of ended saves, failed ones too, keeps no memory."""
    gc.collect()  # what other tests left
    maps = slots_mapped()
    async with serving(root.parent, hold_s=0.0) as daemon:
        before = open_descriptors()
        for number in range(1, 5):
            client = await daemon.client()
            shard = make_shard(rank_arrays(number))
            await client.ready(root, shard)
            if number == 3:  # it fails while it is persisted, with a traceback that holds the snapshot
                (root / "global_step3" / "00000001-0").mkdir(parents=True)
                (root / "global_step3" / "00000001-0" / "00000.index").write_text("in the way")
            await client.whole_save(number, shard)
            await client.outcome(number)
            client.close()
        await until(lambda: len(daemon.hub.jobs) == 0 and daemon.hub.clients == 0 and len(daemon.hub.memory) == 0)
        phases = [str(job.phase) for job in daemon.hub.jobs.ended_at(str(root))]
        assert len(phases) == 4
        assert phases.count("committed") == 3
        assert daemon.hub.account.used == 0
        assert slots_mapped() <= maps
        assert {one for one in open_descriptors() if "memfd" in one or "socket" in one} <= before


async def test_a_slot_is_free_once_nobody_reads_it(root: Path, store: PosixStore) -> None:
    async with serving(root.parent, held_bytes_max=0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.whole_save(1, SHARD)
        assert (await client.next(wire.Free)).slot == 0
        assert (await client.outcome(1)).phase == "committed"
        await client.send(wire.DropSlot(slot=0))
        await until(lambda: daemon.hub.account.used == 0)


async def test_a_slot_that_is_dropped_while_it_is_read(root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """E2"""
    held = HeldPersist(monkeypatch)
    async with serving(root.parent, held_bytes_max=0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.whole_save(1, SHARD)
        await client.phase(1, Phase.PERSISTING)
        await client.send(wire.DropSlot(slot=0))
        await client.slot(0, SHARD)
        await until(lambda: daemon.hub.account.used == 2 * SIZE)
        held.go.set()
        assert (await client.outcome(1)).phase == "committed"
        await until(lambda: daemon.hub.account.used == SIZE)
        assert not [message for message in client.heard if isinstance(message, wire.Free)], "the old slot is not its any more"


# --- what is refused ---------------------------------------------------------------------------------------------------


async def answered(client: RawClient) -> None:
    """The connection goes on."""
    await client.send(wire.Ping())
    await client.next(wire.Pong)


async def test_slots_that_are_refused(daemon: Daemon, root: Path) -> None:
    """E1: each with a reason, and none of them ends the connection."""
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
    assert {one for one in open_descriptors() if "socket" not in one} == before
    await client.slot(0, SHARD)
    await client.slot(0, SHARD)
    assert "is there already" in (await client.refused()).message
    await answered(client)


async def test_too_many_slots(root: Path) -> None:
    """Y3"""
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
        assert daemon.hub.account.used == 2 * SIZE


async def test_more_memory_than_a_client_or_all_of_them_may_have(root: Path) -> None:
    """E3, Y3"""
    async with serving(root.parent, client_bytes_max=2 * SIZE, memory_bytes_max=3 * SIZE) as daemon:
        first, second = await daemon.client(), await daemon.client()
        await first.join(root, 0, 2)
        await second.join(root, 1, 2)
        for number in range(3):
            await first.slot(number, SHARD)
        assert "do not fit" in (await first.refused()).message
        await second.slot(0, SHARD)
        await second.slot(1, SHARD)
        assert f"{3 * SIZE} of {3 * SIZE} bytes are in use" in (await second.refused()).message
        first.close()
        await until(lambda: daemon.hub.account.used == SIZE)
        await second.slot(1, SHARD)
        await answered(second)
        assert daemon.hub.account.used == 2 * SIZE


async def test_layouts_that_are_refused(daemon: Daemon, root: Path) -> None:
    client = await daemon.client()
    await client.join(root)
    outside = make_shard({"w": rank_arrays(0)["model.weight"]})
    bad = wire.WireTensor("w", "float32", (64, 48), outside.tensors[0].box, "rank", 4096 * 3)
    await client.send(wire.Layout(layout=0, nbytes=len(outside.image), tensors=(bad,)))
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
    """Y3"""
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
        ({"attempt": "00000002-0"}, "no attempt of epoch 1"),
        ({"attempt": "1-0"}, "no attempt of epoch 1"),
        ({"attempt": "../../etc"}, "no attempt of epoch 1"),
        ({"attempt": ""}, "no attempt of epoch 1"),
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
        (wire.Announced(save=1, slot=0, layout=0, mark=1, aliases=(), excluded=(), tree=b""), "there is no save 1"),
        (wire.Hello(protocols=(1, 1), release="x"), "does not belong here"),
        (wire.Free(slot=0), "does not belong here"),
        (wire.Query(), "does not belong here"),
    ):
        await client.send(message)
        assert why in (await client.refused()).message
    await client.save(1)
    assert "begin an epoch first" in (await client.refused()).message
    await client.join(root)
    await client.send(wire.Join(root=str(root), rank=0, world_size=1))
    assert "has joined a root already" in (await client.refused()).message
    assert daemon.hub.refused == 16


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
    assert open_descriptors() == before
    await answered(client)


async def test_too_many_saves_on_one_connection(root: Path, store: PosixStore) -> None:
    """Y3"""
    async with serving(root.parent, saves_max=2, grace_s=0.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        for number in range(1, 4):
            await client.save(number)
        assert "2 saves of this client are in flight already" in (await client.refused()).message
        for number in range(4, 400):  # of one that is there: they are as many
            await client.save(number, tag="global_step1", step=1, n=1)
            assert "2 saves of this client" in (await client.refused()).message
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


async def test_too_many_saves_on_ever_new_connections(root: Path, store: PosixStore) -> None:
    """Y3"""
    async with serving(root.parent, saves_max=2, grace_s=0.0) as daemon:
        refused = 0
        for number in range(1, 8):
            client = await daemon.client()
            await client.ready(root, SHARD)
            await client.save(number)
            await client.send(wire.Ping())
            await client.next(wire.Pong)
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
    """Y4: both hear of its end."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.save(2, tag="global_step1", step=1, n=1)
    await client.staged(1, SHARD)
    assert (await client.outcome(1)).phase == (await client.outcome(2)).phase == "committed"


async def test_a_clients_words_do_not_make_lines_in_the_log(
    daemon: Daemon, store: PosixStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "checkpointd")
    client = await daemon.client()
    await client.ready(root, SHARD)
    evil = "x\nERROR all is lost\x1b[2J" + "y" * 100_000
    await client.send(
        wire.Layout(layout=5, nbytes=4096, tensors=(wire.WireTensor(evil, "z", (), SHARD.tensors[0].box, "rank", 0),))
    )
    assert len((await client.refused()).message) <= session_module.TEXT_MAX + 1
    await client.save(1)
    await client.send(wire.Spoiled(save=1, error=ErrorReport(code=evil, message=evil)))
    ended = await client.outcome(1)
    assert ended.error is not None
    assert len(ended.error.message) < 2 * session_module.TEXT_MAX
    assert all("\n" not in record.getMessage() and "\x1b" not in record.getMessage() for record in caplog.records)
    assert all(len(record.getMessage()) < 3 * session_module.TEXT_MAX for record in caplog.records)


# --- clients that do not behave ----------------------------------------------------------------------------------------


async def ask_for_ever(client: RawClient, question: wire.Message) -> None:
    while True:
        await client.send(question)


async def test_a_client_that_does_not_read_is_left(daemon: Daemon, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Y2: and the others are served."""
    deaf, other = await daemon.client(), await daemon.client()
    questions = asyncio.create_task(ask_for_ever(deaf, wire.Fetch(tag="t" * 4000, attempt="00000001-0")))
    await until(lambda: daemon.hub.clients == 1)
    await answered(other)
    with pytest.raises(ConnectionError):
        await questions
    assert sum("does not read" in record.getMessage() for record in caplog.records) == 1


def slots_open() -> int:
    """How many snapshots this process has open: what else it has comes and goes with the store."""
    return sum("/memfd:" in name for name in open_descriptors())


async def test_a_client_that_asks_for_its_snapshot_again_and_again_and_does_not_read(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """Y2, Y3: at most one answer is made for it, and no descriptor waits."""
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
    """Y1"""
    other, client = await daemon.client(), await daemon.client()

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(session_module.Session, "_drop_slot", broken)
    await client.send(wire.DropSlot(slot=0))
    await client.ended()
    assert "unforeseen" in caplog.text
    await answered(other)


async def test_a_defect_of_the_writer_ends_the_save_and_frees_the_client(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Y4"""

    async def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("checkpointd.pipeline.attempt.Attempt._point", broken)
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    ended = await client.outcome(1)
    assert ended.error is not None
    assert (ended.phase, "please report it" in ended.error.message) == ("failed", True)
    await until(lambda: len(daemon.hub.jobs) == 0)


# --- the memory tier over the socket -------------------------------------------------------------------------------------


async def test_a_restarted_trainer_gets_its_snapshot_back(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(3, SHARD)
    await client.outcome(3)
    client.close()
    again = await daemon.client()
    (held,) = (await again.join(root)).held
    assert (held.tag, held.attempt, held.step, held.phase, held.nonce) == ("global_step3", "00000001-0", 3, "committed", "n1")
    await again.send(wire.Fetch(tag=held.tag, attempt=held.attempt))
    received = await again.receive()
    snapshot, descriptor = received.message, received.descriptor
    assert isinstance(snapshot, wire.Snapshot)
    assert descriptor is not None
    assert (snapshot.held, snapshot.nbytes, snapshot.tree) == (held, IMAGE, SHARD.tree)
    image = os.pread(descriptor, IMAGE, 0)
    os.close(descriptor)
    assert image == SHARD.image.tobytes()
    assert [(t.fqn, t.offset) for t in snapshot.tensors] == [(t.fqn, t.offset) for t in SHARD.tensors]
    parts = [image[t.offset : t.offset + t.nbytes] for t in SHARD.tensors]
    assert snapshot.digests == tuple(map(xxh3_128, parts))


async def test_answers_come_in_the_order_of_the_questions(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    client.heard.clear()
    await client.send(wire.Look())
    await client.send(wire.Fetch(tag="global_step1", attempt="00000001-0"))
    await client.send(wire.Fetch(tag="no", attempt="00000001-0"))
    await client.send(wire.Look())
    while len(client.heard) < 4:
        received = await client.receive()
        if received.descriptor is not None:
            os.close(received.descriptor)
    kinds = [type(message).__name__ for message in client.heard if not isinstance(message, wire.Progress)]
    assert kinds == ["Joined", "Snapshot", "Refused", "Joined"]


@pytest.mark.parametrize(("tag", "attempt"), [("global_step9", "00000001-0"), ("global_step1", "00000001-1")])
async def test_another_snapshot_than_the_one_that_is_held(
    daemon: Daemon, store: PosixStore, root: Path, tag: str, attempt: str
) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    await client.send(wire.Fetch(tag=tag, attempt=attempt))
    refused = await client.refused()
    assert (refused.code, f"no snapshot of {tag}" in refused.message) == ("NotFoundError", True)


async def test_another_users_snapshot_is_not_shown_nor_given_nor_dropped(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    daemon.hub.tier.of(str(root), 0).uid = 12345
    await client.send(wire.Look())
    assert (await client.next(wire.Joined)).held == ()
    await client.send(wire.Fetch(tag="global_step1", attempt="00000001-0"))
    assert (await client.refused()).code == "NotFoundError"
    await client.send(wire.Leave())
    await answered(client)
    assert daemon.hub.tier.of(str(root), 0) is not None


async def test_a_snapshot_is_given_to_other_ranks_of_its_root_alone_and_only_by_its_number(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    client, other = await daemon.client(), await daemon.client()
    await client.ready(root, SHARD, world_size=2)
    await client.whole_save(1, SHARD)
    await client.phase(1, Phase.PREPARED)
    joined = await other.join(root, 1, 2)
    assert (joined.held, [(held.tag, held.rank) for held in joined.beside]) == ((), [("global_step1", 0)])
    await other.send(wire.Fetch(tag="global_step1", attempt="00000001-0"))
    assert (await other.refused()).code == "NotFoundError"
    await other.send(wire.Fetch(tag="global_step1", attempt="00000001-0", rank=0))
    received = await other.receive()
    assert isinstance(received.message, wire.Snapshot)
    assert received.descriptor is not None
    assert (os.pread(received.descriptor, IMAGE, 0), received.message.held.rank) == (SHARD.image.tobytes(), 0)
    os.close(received.descriptor)
    elsewhere = await (await daemon.client()).join(root.parent, 1, 2)
    assert (elsewhere.held, elsewhere.beside) == ((), ())
    daemon.hub.tier.of(str(root), 0).uid = 12345
    await other.send(wire.Look())
    assert (await other.next(wire.Joined)).beside == ()
    await other.send(wire.Fetch(tag="global_step1", attempt="00000001-0", rank=0))
    assert (await other.refused()).code == "NotFoundError"
    await (await plan_save(store, epoch=1, tag="global_step1", n=1)).vote(1)
    assert (await client.outcome(1)).phase == "committed"


async def test_the_older_slot_comes_free_when_the_newer_snapshot_is_whole(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """T3"""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.slot(1, SHARD)
    await client.whole_save(1, SHARD, slot=0)
    assert (await client.outcome(1)).phase == "committed"
    await answered(client)
    assert not [message for message in client.heard if isinstance(message, wire.Free)], "it is held"
    await client.whole_save(2, SHARD, slot=1)
    assert (await client.next(wire.Free)).slot == 0
    assert daemon.hub.tier.of(str(root), 0).info.tag == "global_step2"
    await client.outcome(2)


async def test_a_trainer_that_ends_well_leaves_nothing_held(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    await client.send(wire.Leave())
    assert (await client.next(wire.Free)).slot == 0
    client.close()
    await until(lambda: len(daemon.hub.memory) == 0)
    assert (await (await daemon.client()).join(root)).held == ()


async def test_a_snapshot_is_held_for_so_long_after_its_trainer_has_gone(root: Path, store: PosixStore) -> None:
    async with serving(root.parent, hold_s=0.01) as daemon:
        client, second = await daemon.client(), await daemon.client()
        await client.ready(root, SHARD)
        await second.join(root)
        await client.whole_save(1, SHARD)
        await client.outcome(1)
        client.close()
        await until(lambda: daemon.hub.clients == 1)
        assert daemon.hub.tier.of(str(root), 0).timer is None, "its trainer has another connection"
        second.close()
        await until(lambda: len(daemon.hub.memory) == 0)


async def test_a_trainer_that_is_back_in_time_finds_its_snapshot_held(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    client.close()
    kept = daemon.hub.tier.of(str(root), 0)
    await until(lambda: kept.timer is not None)
    again = await daemon.client()
    assert len((await again.join(root)).held) == 1
    assert kept.timer is None


async def test_attempts_have_names_of_their_own(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """J1: the same tag saved again is another job."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.slot(1, SHARD)
    await client.whole_save(1, SHARD, slot=0, tag="t")
    await client.whole_save(2, SHARD, slot=1, tag="t", attempt=str(AttemptId(1, 1)), n=2)
    assert (await client.outcome(1)).phase == (await client.outcome(2)).phase == "committed"


async def test_a_root_that_was_removed_and_made_again_has_saves_of_its_own(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """J1: its first epoch is 1 again, and so are its attempts; what was saved there before says nothing of them."""
    before = await daemon.client()
    await before.ready(root, SHARD)
    await before.whole_save(1, SHARD)
    assert (await before.outcome(1)).phase == "committed"
    before.close()
    await until(lambda: daemon.hub.clients == 0)
    remade: list[str] = []
    daemon.hub.on_remade = remade.append
    shutil.rmtree(root)
    async with PosixStore(root) as again:
        await begin_epoch(again, 1)
        after = await daemon.client()
        joined = await after.join(root)
        assert [held.nonce for held in joined.held] == ["n1"]
        await after.begin(1, nonce="n2")
        other = shard_of(5)
        await after.slot(0, other)
        await after.layout(0, other)
        await after.whole_save(1, other)
        assert (await after.outcome(1)).phase == "committed"
        assert remade == [str(root)]
        assert await load_arrays(again, "global_step1", 0) == expected(5)
        await after.send(wire.Look())
        assert [held.nonce for held in (await after.next(wire.Joined)).held] == ["n2"]


async def test_what_a_restart_would_not_load_from_the_store_is_not_held(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """A checkpoint beside the way, as of an average of the weights, does not move `latest`, and must not be resumed from."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.slot(1, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    await client.whole_save(2, SHARD, slot=1, save_latest=False)
    await client.outcome(2)
    await client.send(wire.Look())
    assert [held.step for held in (await client.next(wire.Joined)).held] == [1]


async def test_a_snapshot_that_is_whole_by_its_mark_alone_is_not_held_for_ever(root: Path, store: PosixStore) -> None:
    """Its trainer's connection ended before the daemon knew that it was whole."""
    async with serving(root.parent, hold_s=0.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.save(1)
        await client.announced(1, SHARD, mark=7)
        await answered(client)
        [job] = daemon.hub.jobs.all()
        daemon.service._deaths.clear()
        client.close()
        await until(lambda: daemon.hub.clients == 0)
        job.staged()
        await until(lambda: not list(daemon.hub.tier))


async def test_a_save_of_another_user_is_not_joined(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await answered(client)
    [job] = daemon.hub.jobs.all()
    job.uid += 1
    other = await daemon.client()
    await other.join(root)
    await other.begin(1)
    await other.save(1)
    assert "is saved by another user" in (await other.refused()).message
    job.uid -= 1
    await client.staged(1, SHARD)
    assert (await client.outcome(1)).phase == "committed"


async def test_two_fetches_of_one_snapshot_hold_it_each(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    [kept] = list(daemon.hub.tier)
    digests = kept.digests
    await asyncio.wait({digests})
    kept.digests = asyncio.get_running_loop().create_future()
    for asking in (client, await daemon.client()):
        if asking is not client:
            await asking.join(root)
        await asking.send(wire.Fetch(tag="global_step1", attempt="00000001-0"))
    await until(lambda: len(kept.slot._users) == 3)
    kept.digests.set_result(digests.result())
    await client.next(wire.Snapshot)


async def test_a_client_has_room_for_only_so_many_tensors(root: Path) -> None:
    """Y3"""
    async with serving(root.parent, client_bytes_max=1 << 16) as daemon:
        client = await daemon.client()
        await client.join(root)
        tensors = tuple(wire.WireTensor(f"t{i}", "uint8", (0,), Box((0,), (0,)), "rank", 0) for i in range(50))
        for number in range(8):  # those that are forgotten count no more
            await client.send(wire.Layout(layout=number % 2, nbytes=4096, tensors=tensors[: 10 + number]))
        await answered(client)
        await client.send(wire.Layout(layout=3, nbytes=4096, tensors=tensors))
        assert "bytes are in use" in (await client.refused()).message
