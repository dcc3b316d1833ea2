"""Saves over the socket: from the hand-over to the commit, broken connections, dead clients, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import re
import socket
import sys
from contextvars import ContextVar
from pathlib import Path

import pytest

from checkpointd.commit.machine import Phase
from checkpointd.daemon import hub
from checkpointd.daemon.memory.layouts import wire_tensors
from checkpointd.daemon.process.logs import JsonFormatter
from checkpointd.daemon.protocol import wire
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline import attempt
from checkpointd.pipeline.root import root_view
from checkpointd.store.names import TEMPORARY
from checkpointd.store.posix import rooted
from checkpointd.store.posix.store import PosixStore
from checkpointd.waits import to_the_end
from tests.builders import HeldPersist, load_arrays, make_shard, plan_save, rank_arrays
from tests.unit.daemon.conftest import (
    N1,
    Daemon,
    open_descriptors,
    serving,
    shard_of,
    slot_bytes,
    slot_bytes_charged,
    slot_of,
    slots_mapped,
    slots_open,
    until,
)

SHARD = shard_of()
IMAGE = len(SHARD.buffer)
SIZE = slot_bytes(SHARD)


def expected(seed: int = 0) -> dict[str, bytes]:
    return {fqn: array.tobytes() for fqn, array in rank_arrays(seed).items()}


# --- the way it should go ----------------------------------------------------------------------------------------------


async def test_a_save_is_committed_and_reads_back_bit_for_bit(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    assert await client.ready(root, SHARD) == wire.Joined(held=(), in_flight=())
    await client.whole_save(1, SHARD)
    ended = await client.outcome(1)
    assert (ended.phase, ended.error) == ("committed", None)
    assert await load_arrays(store, "global_step1", 0) == expected()
    assert (root / "latest").read_text() == "global_step1\n"
    checkpoint = await root_view.find(store, "global_step1")
    assert checkpoint.commit.step == 1


async def test_a_trainer_hears_why_the_daemon_does_not_reach_its_root(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    report = ErrorReport(code="UnreadableError", message="Connection refused", phase="")
    daemon.hub.root_scans[str(root)] = hub.RootScan(problem=report)
    await client.send(wire.Look())
    assert (await client.next(wire.Joined)).trouble == "Connection refused"
    await client.whole_save(1, SHARD)
    await client.outcome(1)
    told = [message.trouble for message in client.heard if isinstance(message, wire.Progress)]
    assert set(told) == {"Connection refused"}
    daemon.hub.root_scans[str(root)] = hub.RootScan(
        problem=ErrorReport(code="DamagedError", message="latest is damaged", phase="")
    )
    await client.send(wire.Look())
    assert (await client.next(wire.Joined)).trouble == "", "it is reached"


async def test_the_log_names_root_tag_rank_bytes_and_seconds(
    daemon: Daemon, store: PosixStore, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, log = Lines(), logging.getLogger("checkpointd")
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    try:
        with caplog.at_level(logging.INFO, "checkpointd"):
            client = await daemon.client()
            await client.ready(root, SHARD)
            await client.whole_save(1, SHARD)
            await client.outcome(1)
            await client.save(2)
            await client.send(wire.Spoiled(save=2, error=ErrorReport(code="StagingError", message="torn")))
            await client.outcome(2)
    finally:
        log.removeHandler(handler)
    found = [json.loads(line) for line in lines]
    [done] = [record for record in found if record.get("event") == "committed"]
    assert (done["root"], done["tag"], done["rank"], done["bytes"]) == (
        str(root),
        "global_step1",
        0,
        sum(map(len, expected().values())),
    )
    assert {"seconds", "stored_bytes", "phase_seconds"} <= done.keys()
    assert re.search(
        r"global_step1/00000001-0: committed: [\d.]+ [KM]iB, stored as .* in [\d.]+ m?s \(staging", done["message"]
    )
    [failed] = [record for record in found if record.get("event") == "failed"]
    assert (failed["root"], failed["tag"], failed["rank"], failed["level"]) == (str(root), "global_step2", 0, "error")


async def test_the_log_says_which_trainers_come_close_and_go(
    daemon: Daemon, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "checkpointd"):
        for well in (True, False):
            client = await daemon.client()
            await client.join(root, rank=3, world_size=8)
            if well:
                await client.send(wire.Leave())
            client.close()
            await until(lambda: not any(record.connections for record in daemon.hub.ranks_at(str(root))))
    who = f"rank 3 (process {os.getpid()})"
    said = [(record.levelname, record.getMessage()) for record in caplog.records if who in record.getMessage()]
    assert said == [
        ("INFO", f"{who} joined"),
        ("INFO", f"{who} closed its Checkpointer"),
        ("INFO", f"{who} joined"),
        ("WARNING", f"{who} went without closing its Checkpointer"),
    ]


async def test_a_trainer_that_comes_and_goes_all_the_time_does_not_fill_the_log(
    daemon: Daemon, root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "TRAINERS_SAID", 3)
    with caplog.at_level(logging.INFO, "checkpointd"):
        for _ in range(5):
            client = await daemon.client()
            await client.join(root)
            client.close()
            await until(lambda: not any(record.connections for record in daemon.hub.ranks_at(str(root))))
    assert [caplog.text.count(word) for word in (") joined", ") went without")] == [3, 3]


async def test_the_phases_come_in_order_and_the_bytes_with_them(daemon: Daemon, store: PosixStore, root: Path) -> None:
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    assert (await client.next(wire.PhaseEntered)).phase == "staging"
    await client.staged(1, SHARD)
    phases = [(await client.next(wire.PhaseEntered)).phase for _ in range(4)]
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
    others = await plan_save(store, start=1, world_size=3, tag="global_step1", n=1)
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
    """SAVEJOB-1: it does so only for a shard in the spool, which needs it no more."""
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
    assert known.nonce == N1
    await second.save(7, tag="global_step1", step=1, n=1, spooled=True)
    assert (await second.next(wire.PhaseEntered)).phase == "persisting"
    assert len(daemon.hub.jobs) == 1
    held.go.set()
    assert (await second.outcome(7)).phase == "committed"
    assert await load_arrays(store, "global_step1", 0) == expected()


async def test_a_client_that_comes_back_late_hears_how_its_save_ended(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """SESSION-4"""
    first = await daemon.client()
    await first.ready(root, SHARD)
    await first.whole_save(1, SHARD)
    await first.outcome(1)
    await until(lambda: len(daemon.hub.jobs) == 0)
    first.close()
    second = await daemon.client()
    await second.ready(root, SHARD)
    await second.save(9, tag="global_step1", step=1, n=1, spooled=True)
    assert (await second.outcome(9)).phase == "committed"
    await second.save(10, tag="global_step1", step=1, n=1)
    assert "was begun already, and a shard has one writer" in (await second.refused()).message


async def test_a_save_that_a_lost_client_began_is_begun_by_nobody_else(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SAVEJOB-1: its trainer, which has lost the connection, votes no in its place."""
    held = HeldPersist(monkeypatch)
    first, second = await daemon.client(), await daemon.client()
    await first.ready(root, SHARD)
    await first.whole_save(1, SHARD)
    await first.phase(1, Phase.PERSISTING)
    first.close()
    await second.ready(root, SHARD)
    await second.save(5, tag="global_step1", step=1, n=1)
    assert "was begun already, and a shard has one writer" in (await second.refused()).message
    held.go.set()
    await until(lambda: bool(daemon.hub.jobs.ended_at(str(root))))
    assert await load_arrays(store, "global_step1", 0) == expected()


async def test_a_snapshot_that_is_announced_twice_fails_its_save(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """SAVEJOB-3: its slot is free, once."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.announced(1, SHARD)
    await client.announced(1, SHARD)
    assert "was announced before" in (await client.refused()).message
    assert (await client.outcome(1)).phase == "failed"
    assert (await client.next(wire.Free)).slot == 0


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
    """SAVEJOB-2: the snapshot was whole, and its client said so; that nobody reads the answers changes nothing."""
    client = await daemon.client()
    frames = [
        wire.Join(root=str(root), rank=0, world_size=1),
        wire.Begin(start=1, nonce=N1, compression="none", chunk_bytes=4096, budget_bytes=1 << 26, commit_timeout_s=60.0),
        *[wire.Look()] * 20,
    ]
    client.channel._socket.setblocking(True)
    for message in frames:
        client.channel._socket.sendall(wire.encode(message))
    descriptor = slot_of(SHARD)
    socket.send_fds(client.channel._socket, [wire.encode(wire.Slot(slot=0, nbytes=SIZE), 1)], [descriptor])
    os.close(descriptor)
    save = wire.Save(save=1, tag="t", attempt="00000001-0", step=1, n=1, save_latest=True, left_s=60.0)
    contents = wire.Contents(save=1, tree=SHARD.tree)
    announced = wire.Announced(save=1, slot=0, layout=0, mark=1)
    layout = wire.Layout(layout=0, nbytes=IMAGE, tensors=wire_tensors(SHARD.tensors))
    for last in (layout, save, contents, announced, wire.Staged(save=1)):
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
    """SAVEJOB-2: the daemon votes no at once, long before the deadline."""
    child = await start_child(daemon, root, *how)
    await until(lambda: len(daemon.hub.jobs) == 1)
    child.kill()
    await until(lambda: len(daemon.hub.jobs) == 0)
    (ended,) = daemon.hub.jobs.ended_at(str(root))
    assert ended.phase is Phase.FAILED
    assert ended.save.error is not None
    assert "ended, or lost its connection, while its snapshot was being taken" in ended.save.error.message
    assert f"process {child.pid}" in ended.save.error.message
    await until(lambda: daemon.hub.clients == 0)
    await end_of(child)


@pytest.mark.parametrize("how", ["staged", "marked"])
async def test_a_client_that_dies_once_its_snapshot_is_whole(
    daemon: Daemon, store: PosixStore, root: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """SAVEJOB-2, SAVEJOB-3, SLOTMAP-2: nothing of it is needed any more, not even its word."""
    held = HeldPersist(monkeypatch)
    child = await start_child(daemon, root, how)
    child.kill()
    await end_of(child)
    await until(lambda: daemon.hub.clients == 0)
    await until(lambda: [job.phase for job in daemon.hub.jobs.all()] == [Phase.PERSISTING])
    assert daemon.hub.tier.of(str(root), os.getuid(), 0) is not None
    held.go.set()
    await until(lambda: len(daemon.hub.jobs) == 0)
    assert await load_arrays(store, "global_step1", 0) == expected()


async def test_a_client_that_hangs_up_with_its_snapshot_not_whole_but_lives(
    daemon: Daemon, store: PosixStore, root: Path
) -> None:
    """SAVEJOB-2: it votes no, too, and the slot may be written again."""
    client = await daemon.client()
    await client.ready(root, SHARD)
    await client.save(1)
    await client.phase(1, Phase.STAGING)
    client.close()
    await until(lambda: bool(daemon.hub.jobs.ended_at(str(root))))
    (ended,) = daemon.hub.jobs.ended_at(str(root))
    assert ended.phase is Phase.FAILED


async def test_an_attempt_that_is_over_before_the_snapshot_is_whole(daemon: Daemon, store: PosixStore, root: Path) -> None:
    """SESSION-4: the job ends, the late snapshot is no error, and its slot is free at once."""
    client = await daemon.client()
    await client.ready(root, SHARD, world_size=2)
    await client.save(1)
    other = await plan_save(store, start=1, tag="global_step1", n=1, failing={1: RuntimeError("no")})
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
    """SLOTMAP-2, SAVEJOB-4: what is remembered of ended saves, failed ones too, keeps no memory."""
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
        assert daemon.hub.memory.release_lingering() == 0
        assert daemon.hub.account.used == 0
        assert (slots_open(), slots_mapped()) == (0, 0)
        assert {one for one in open_descriptors() if "socket" in one} <= before


async def test_a_slot_is_free_once_nobody_reads_it(root: Path, store: PosixStore) -> None:
    async with serving(root.parent, held_bytes_max=0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.whole_save(1, SHARD)
        assert (await client.next(wire.Free)).slot == 0
        assert (await client.outcome(1)).phase == "committed"
        await client.send(wire.DropSlot(slot=0))
        await until(lambda: slot_bytes_charged(daemon) == 0)


async def test_a_slot_that_is_dropped_while_it_is_read(root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """SLOTMAP-2"""
    held = HeldPersist(monkeypatch)
    async with serving(root.parent, held_bytes_max=0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.whole_save(1, SHARD)
        await client.phase(1, Phase.PERSISTING)
        await client.send(wire.DropSlot(slot=0))
        await client.slot(0, SHARD)
        await until(lambda: slot_bytes_charged(daemon) == 2 * SIZE)
        held.go.set()
        assert (await client.outcome(1)).phase == "committed"
        await until(lambda: slot_bytes_charged(daemon) == SIZE)
        assert not [message for message in client.heard if isinstance(message, wire.Free)], "the old slot is not its any more"


async def test_what_still_runs_behind_an_error_runs_to_its_end(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SAVEJOB-4: letting go of an error's traceback does not end the calls in it, which have files to remove."""
    late = asyncio.Event()
    link, put = rooted.Root.link, PosixStore.put_if_absent
    aborting = ContextVar("aborting", default=False)

    async def slow_put(self: PosixStore, key: str, data: bytes, *, durable: bool = True) -> bool:
        aborting.set(b'"abort"' in data)
        return await put(self, key, data, durable=durable)

    async def slow_link(self: rooted.Root, temporary: str, path: str, key: str, *, durable: bool = True) -> None:
        if aborting.get():
            await to_the_end(asyncio.ensure_future(late.wait()))
        await link(self, temporary, path, key, durable=durable)

    monkeypatch.setattr(PosixStore, "put_if_absent", slow_put)
    monkeypatch.setattr(rooted.Root, "link", slow_link)
    monkeypatch.setattr(attempt, "ANSWER_S", 0.05)
    async with serving(root.parent) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD, world_size=2)
        await client.whole_save(1, SHARD, left_s=0.1)  # rank 1 never votes
        assert (await client.outcome(1)).phase == "failed"
        await until(lambda: not daemon.hub.jobs.all())
        gc.collect()
        assert list((root / TEMPORARY).iterdir())
        late.set()
        await until(lambda: not list((root / TEMPORARY).iterdir()))
