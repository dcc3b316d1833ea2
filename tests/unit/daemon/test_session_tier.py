"""Saves over the socket: snapshots that are held for restarts."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from checkpointd.codec.checksum import xxh3_128
from checkpointd.commit.machine import Phase
from checkpointd.daemon.protocol import wire
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.store.posix.store import PosixStore
from tests.builders import load_arrays, plan_save, rank_arrays
from tests.unit.daemon.conftest import (
    N1,
    N2,
    Daemon,
    answered,
    serving,
    shard_of,
    slot_bytes,
    slot_of,
    until,
)

SHARD = shard_of()
IMAGE = len(SHARD.buffer)


def expected(seed: int = 0) -> dict[str, bytes]:
    return {fqn: array.tobytes() for fqn, array in rank_arrays(seed).items()}


# --- the memory tier over the socket -------------------------------------------------------------------------------------


async def test_a_restarted_trainer_gets_its_snapshot_back(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(3, SHARD)
    await client.outcome(3)
    client.close()
    again = await daemon.client()
    (held,) = (await again.join(root)).held
    assert (held.tag, held.attempt, held.step, held.phase, held.nonce) == ("global_step3", "00000001-0", 3, "committed", N1)
    await again.send(wire.Fetch(tag=held.tag, attempt=held.attempt))
    received = await again.receive()
    snapshot, descriptor = received.message, received.descriptor
    assert isinstance(snapshot, wire.Snapshot)
    assert descriptor is not None
    assert (snapshot.held, snapshot.nbytes, snapshot.tree) == (held, IMAGE, SHARD.tree)
    buffer = os.pread(descriptor, IMAGE, 0)
    os.close(descriptor)
    assert buffer == SHARD.buffer.tobytes()
    assert [(t.fqn, t.offset) for t in snapshot.tensors] == [(t.fqn, t.offset) for t in SHARD.tensors]
    parts = [buffer[t.offset : t.offset + t.nbytes] for t in SHARD.tensors]
    assert snapshot.digests == tuple(map(xxh3_128, parts))


async def test_a_save_that_is_decided_is_not_in_flight_while_left_overs_are_removed(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, go_on = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> None:
        removing.set()
        await go_on.wait()

    client = await daemon.client()
    await client.ready(root, SHARD)
    monkeypatch.setattr(Tidier, "_remove", slow)
    monkeypatch.setattr(Tidier, "room_for", noted)
    await client.whole_save(3, SHARD)
    await client.outcome(3)
    await removing.wait()
    client.close()
    again = await daemon.client()
    assert (await again.join(root)).in_flight == ()
    go_on.set()


async def noted(*_: object) -> None:
    """There is room."""


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
    assert (os.pread(received.descriptor, IMAGE, 0), received.message.held.rank) == (SHARD.buffer.tobytes(), 0)
    os.close(received.descriptor)
    elsewhere = await (await daemon.client()).join(root.parent, 1, 2)
    assert (elsewhere.held, elsewhere.beside) == ((), ())
    await (await plan_save(store, start=1, tag="global_step1", n=1)).vote(1)
    assert (await client.outcome(1)).phase == "committed"


async def test_the_older_slot_comes_free_when_the_newer_snapshot_is_whole(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """TIER-3"""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.slot(1, SHARD)
    await client.whole_save(1, SHARD, slot=0)
    assert (await client.outcome(1)).phase == "committed"
    await answered(client)
    assert not [message for message in client.heard if isinstance(message, wire.Free)], "it is held"
    await client.whole_save(2, SHARD, slot=1)
    assert (await client.next(wire.Free)).slot == 0
    assert daemon.hub.tier.of(str(root), os.getuid(), 0).info.tag == "global_step2"
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


async def test_a_trainer_that_closed_is_told_from_one_that_went(daemon: Daemon, root: Path) -> None:
    clients = [await daemon.client() for _ in range(2)]
    for rank, client in enumerate(clients):
        await client.join(root, rank=rank, world_size=2)
    await clients[0].send(wire.Leave())
    for client in clients:
        client.close()
    await until(lambda: daemon.hub.clients == 0)
    closed, gone = daemon.hub.ranks_at(str(root))
    assert (closed.left_well, gone.left_well) == (True, False)
    assert None not in (closed.gone_at, gone.gone_at)
    await (await daemon.client()).join(root, rank=0, world_size=2)
    assert (closed.left_well, closed.gone_at) == (False, None)


async def test_a_snapshot_is_held_for_so_long_after_its_trainer_has_gone(root: Path, store: PosixStore) -> None:
    async with serving(root.parent, hold_s=0.01) as daemon:
        client, second = await daemon.client(), await daemon.client()
        await client.ready(root, SHARD)
        await second.join(root)
        await client.whole_save(1, SHARD)
        await client.outcome(1)
        client.close()
        await until(lambda: daemon.hub.clients == 1)
        assert daemon.hub.tier.of(str(root), os.getuid(), 0).timer is None, "its trainer has another connection"
        second.close()
        await until(lambda: len(daemon.hub.memory) == 0)


async def test_a_trainer_that_is_back_in_time_finds_its_snapshot_held(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    client.close()
    kept = daemon.hub.tier.of(str(root), os.getuid(), 0)
    await until(lambda: kept.timer is not None)
    again = await daemon.client()
    assert len((await again.join(root)).held) == 1
    assert kept.timer is None


async def test_attempts_have_names_of_their_own(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """SAVEJOB-1: the same tag saved again is another job."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.slot(1, SHARD)
    await client.whole_save(1, SHARD, slot=0, tag="t")
    await client.whole_save(2, SHARD, slot=1, tag="t", attempt=str(AttemptId(1, 1)), n=2)
    assert (await client.outcome(1)).phase == (await client.outcome(2)).phase == "committed"


async def test_a_root_that_was_removed_and_made_again_has_saves_of_its_own(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """SAVEJOB-1: its first start is 1 again, and so are its attempts; what was saved there before says nothing of them."""
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
        after = await daemon.client()
        joined = await after.join(root)
        assert [held.nonce for held in joined.held] == [N1]
        await after.begin(1, nonce=N2)
        other = shard_of(5)
        await after.slot(0, other)
        await after.layout(0, other)
        await after.whole_save(1, other)
        assert (await after.outcome(1)).phase == "committed"
        assert remade == [str(root)]
        assert await load_arrays(again, "global_step1", 0) == expected(5)
        await after.send(wire.Look())
        assert [held.nonce for held in (await after.next(wire.Joined)).held] == [N2]


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
        await client.join(root)
        await client.begin(1)
        descriptor = slot_of(SHARD, mark=7)
        await client.send(wire.Slot(slot=0, nbytes=slot_bytes(SHARD)), descriptor)
        os.close(descriptor)
        await client.layout(0, SHARD)
        await client.save(1)
        await client.announced(1, SHARD, mark=7)
        await answered(client)
        client.close()
        await until(lambda: bool(daemon.hub.jobs.ended_at(str(root))))
        assert await load_arrays(store, "global_step1", 0) == expected()
        await until(lambda: not list(daemon.hub.tier))


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
    """SESSION-3"""
    async with serving(root.parent, user_bytes_max=1 << 16) as daemon:
        client = await daemon.client()
        await client.join(root)
        tensors = tuple(wire.WireTensor(f"t{i}", "uint8", (0,), Box((0,), (0,)), "rank", 0) for i in range(50))
        for number in range(8):  # those that are forgotten count no more
            await client.send(wire.Layout(layout=number % 2, nbytes=4096, tensors=tensors[: 10 + number]))
        await answered(client)
        await client.send(wire.Layout(layout=3, nbytes=4096, tensors=tensors))
        assert "is in use" in (await client.refused()).message


async def test_a_daemon_leaves_when_nobody_has_needed_it_for_a_while(root: Path, store: PosixStore) -> None:
    """It stays for a trainer, and for a snapshot that the next start may want."""
    async with serving(root.parent, hold_s=3600.0) as daemon:
        idle = asyncio.create_task(daemon.service.leave_when_idle(0.01))
        client = await daemon.client()
        await client.ready(root, SHARD)
        await asyncio.wait({idle}, timeout=0.05)
        await client.whole_save(1, SHARD)
        await client.outcome(1)
        client.close()
        await until(lambda: daemon.hub.clients == 0)
        await asyncio.wait({idle}, timeout=0.05)
        assert not daemon.hub.leaving
        kept = daemon.hub.tier.of(str(root), os.getuid(), 0)
        daemon.hub.tier.drop(kept)
        await daemon.left()
        assert daemon.hub.leaving
