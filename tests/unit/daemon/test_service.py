"""The daemon as a whole: who is let in, floods of connections and of descriptors, and how it leaves (SERVICE-1
to SERVICE-3).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from checkpointd.commit.machine import Phase
from checkpointd.daemon import service as service_module
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.hub_status import standing
from checkpointd.daemon.protocol import listener, wire
from checkpointd.daemon.protocol.channel import Channel
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.daemon.status.model import DaemonStatus
from checkpointd.errors import UsageError
from checkpointd.pipeline.root.leases import HeldLease
from checkpointd.store.posix.store import PosixStore
from tests.builders import HeldPersist
from tests.unit.daemon.conftest import (
    ADD_SEALS,
    Daemon,
    open_descriptors,
    sealed_memfd,
    serving,
    shard_of,
    until,
)

SHARD = shard_of()
HELLO = wire.encode(wire.Hello(protocols=wire.PROTOCOLS, release="test"))


async def turned_away(daemon: Daemon, *said: bytes) -> str:
    """Why a connection that says this is ended."""
    channel = await daemon.channel()
    for data in said:
        await asyncio.get_running_loop().sock_sendall(channel._socket, data)
    reason = ""
    while (received := await channel.receive()) is not None:
        assert isinstance(received.message, wire.Refused), received.message
        reason = received.message.error.message
    channel.close()
    return reason


async def served(daemon: Daemon) -> None:
    """A well-behaved client is let in and answered."""
    client = await daemon.client()
    await client.send(wire.Ping())
    await client.next(wire.Pong)
    client.close()


# --- the handshake -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "not checkpointd's protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "not checkpointd's protocol"),
        (b"\0" * 100, "not checkpointd's protocol"),
        (wire.encode(wire.Query()), "must be a hello, not a Query"),
        (wire.encode(wire.Join(root="/", rank=0, world_size=1)), "must be a hello, not a Join"),
        (wire.HEAD.pack(wire.MAGIC, 0, 0, 4097), "announces 4097 bytes; at most 4096"),
        (wire.HEAD.pack(wire.MAGIC, 0, 0, 0xFFFFFFFF), "announces 4294967295 bytes"),
        (wire.HEAD.pack(wire.MAGIC, 0, 0, 3) + b"\x81\xa1x", "malformed"),
        (
            wire.encode(wire.Hello(protocols=(7, 9), release="9.1")),
            "the client is 9.1 and speaks 7 to 9: upgrade the older one",
        ),
        (wire.encode(wire.Hello(protocols=(0, 0), release="0.0")), "speaks 0 to 0"),
        (wire.encode(wire.Hello(protocols=(1, 1), release="x"), 1), "without the descriptor"),
    ],
)
async def test_what_is_no_hello(daemon: Daemon, said: bytes, why: str) -> None:
    assert why in await turned_away(daemon, said)
    assert daemon.hub.refused == 1
    await served(daemon)


async def test_a_hello_that_never_comes_or_not_whole(root: Path) -> None:
    async with serving(root.parent, hello_s=0.01) as daemon:
        assert "no hello came within 0.01 s" in await turned_away(daemon)
        assert "no hello came within 0.01 s" in await turned_away(daemon, HELLO[:-1])
        assert daemon.hub.clients == 0


async def test_the_welcome_names_the_bounds(root: Path) -> None:
    async with serving(root.parent, slots_max=3, user_bytes_max=1 << 20) as daemon:
        welcome = (await daemon.client()).welcome
        assert (welcome.protocol, welcome.pid) == (1, os.getpid())
        assert (welcome.slots_max, welcome.memory_bytes_max) == (3, 1 << 20)
        assert welcome.frame_bytes_max == wire.FRAME_BYTES_MAX


async def test_a_descriptor_with_the_hello_is_closed(daemon: Daemon) -> None:
    before = open_descriptors()
    channel = await daemon.channel()
    await channel.send(wire.Hello(protocols=(1, 1), release="x"), 0)
    assert (await channel.receive()) is not None
    channel.close()
    await until(lambda: daemon.hub.clients == 0)
    assert open_descriptors() <= before


# --- who is let in -----------------------------------------------------------------------------------------------------

AS_ANOTHER = """
import os, socket, sys
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.decoder import Decoder
os.setgid(65534)
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
try:
    client.connect(sys.argv[1])
except OSError as error:
    print(error.strerror)
    sys.exit()
try:
    client.sendall(wire.encode(wire.Hello(protocols=wire.PROTOCOLS, release="x", role=sys.argv[2])))
except BrokenPipeError:
    pass  # turned away already: the reason is there to be read
(message, _), = Decoder(1 << 20).feed(client.recv(1 << 16))
print(type(message).__name__, getattr(getattr(message, "error", None), "message", ""))
"""


async def as_another_user(path: str, role: str = "rank") -> str:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AS_ANOTHER, path, role, stdout=PIPE, cwd=Path(__file__).parents[3]
    )
    said, _ = await child.communicate()
    return said.decode().strip()


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that every user gets to: pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="checkpointd-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def opened_to_all(public: Path, path: str) -> None:
    """Nothing but the daemon's own check keeps others out."""
    for directory in Path(path).parents:
        if directory.is_relative_to(public):
            directory.chmod(0o755)
    os.chmod(path, 0o666)


@pytest.mark.root
async def test_another_user_does_not_get_to_the_socket(daemon: Daemon) -> None:
    assert await as_another_user(daemon.path) == "Permission denied"


@pytest.mark.root
async def test_another_user_is_turned_away_also_where_the_socket_is_open(public: Path) -> None:
    async with serving(public) as daemon:
        opened_to_all(public, daemon.path)
        assert "which serves user 0: start it with --uid 65534 as well" in await as_another_user(daemon.path)
        await served(daemon)


@pytest.mark.root
async def test_another_user_who_may(public: Path) -> None:
    async with serving(public, uids=(0, 65534)) as daemon:
        opened_to_all(public, daemon.path)
        assert await as_another_user(daemon.path) == "Welcome"


@pytest.mark.root
async def test_a_user_who_may_only_ask_for_the_status(public: Path) -> None:
    async with serving(public, status_uids=(65534,)) as daemon:
        opened_to_all(public, daemon.path)
        assert "user 65534 may not use this daemon" in await as_another_user(daemon.path)
        assert await as_another_user(daemon.path, "status") == "Welcome"


async def test_the_daemons_own_user_may_only_ask_where_others_are_served(root: Path) -> None:
    async with serving(root.parent, uids=(os.geteuid() + 1,)) as daemon:
        assert "may not use this daemon" in await turned_away(daemon, HELLO)
        await (await daemon.client("status")).send(wire.Query())


async def test_no_more_clients_than_there_may_be(root: Path) -> None:
    async with serving(root.parent, clients_max=2) as daemon:
        first, second = await daemon.client(), await daemon.client()
        assert "all connections for ranks are taken (2): raise clients_max (--clients)" in await turned_away(daemon, HELLO)
        first.close()
        await until(lambda: daemon.hub.clients == 1)
        await served(daemon)
        await second.send(wire.Ping())
        await second.next(wire.Pong)


# --- floods --------------------------------------------------------------------------------------------------------------


async def test_a_thousand_connections(root: Path) -> None:
    """SERVICE-1: they say nothing; who says something is served among them and after them."""
    async with serving(root.parent, clients_max=16, hello_s=1000.0) as daemon:
        before = open_descriptors()
        silent = []
        for number in range(1000):
            silent.append(daemon.raw())
            if number % 50 == 0:
                await served(daemon)
        await until(lambda: len(daemon.service._connections) <= 16)
        await served(daemon)
        for connection in silent:
            connection.close()
        await until(lambda: not daemon.service._connections)
        await served(daemon)
        await until(lambda: not daemon.service._connections)
        assert open_descriptors() <= before


async def test_a_thousand_clients_one_after_another(daemon: Daemon) -> None:
    before = open_descriptors()
    for _ in range(1000):
        channel = await daemon.channel()
        await channel.send(wire.Hello(protocols=(1, 1), release="x"))
        await channel.receive()
        channel.close()
    await until(lambda: daemon.hub.clients == 0 and not daemon.service._connections)
    assert open_descriptors() <= before


async def test_descriptors_by_the_hundred(daemon: Daemon) -> None:
    """CHANNEL-1: none of them stays."""
    before = open_descriptors()
    for _ in range(20):
        connection = daemon.raw()
        connection.sendall(HELLO)
        socket.send_fds(connection, [wire.encode(wire.Ping())], [0] * 250)
        connection.close()
    await until(lambda: not daemon.service._connections)
    await served(daemon)
    await until(lambda: not daemon.service._connections)
    assert open_descriptors() <= before


FEW_DESCRIPTORS = """
import os, resource, sys
from checkpointd.config import ServeConfig
from checkpointd.daemon import service
from checkpointd.daemon.runner import serve
service._SAY_AGAIN_S = 1000.0
open_now = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + 30, open_now + 30))
import logging
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
serve(ServeConfig(socket=sys.argv[1], roots=(sys.argv[2],), hello_s=1000.0), on_ready=lambda _: print("ready", flush=True))
"""


async def test_a_daemon_that_runs_out_of_descriptors(tmp_path: Path, store: PosixStore, root: Path) -> None:
    """SERVICE-1: logged and survived; a client that behaves is served meanwhile, and its save is committed after."""
    path = str(tmp_path / "socket")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", FEW_DESCRIPTORS, path, str(root.parent)), stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    daemon = Daemon(tmp_path, socket=path)  # never started: the other process listens at its socket
    silent = [daemon.raw() for _ in range(200)]
    client = await daemon.client()
    await client.send(wire.Ping())
    await client.next(wire.Pong)
    greedy = await daemon.client()
    await greedy.join(root, 0, 1)
    for number in range(40):
        try:
            await greedy.slot(number % 4, SHARD)
        except ConnectionError:
            break
    for connection in silent:
        connection.close()
    greedy.close()
    late = await daemon.client()
    await late.ready(root, SHARD)
    await late.whole_save(1, SHARD)
    assert (await late.outcome(1)).phase == "committed"
    late.close()
    client.close()
    process.terminate()
    _, log = await process.communicate()
    said = log.decode()
    assert process.returncode == 0, said
    assert "no connection can be taken: [EMFILE] Too many open files: " in said
    assert said.count("no connection can be taken") == 1, "it does not fill the disk with it"
    assert "Traceback" not in said, said


async def test_what_goes_wrong_in_accepting_does_not_end_it(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SERVICE-3"""
    monkeypatch.setattr(service_module, "PAUSE_S", 0.0)
    failures = iter([OSError(24, "Too many open files"), ConnectionAbortedError(), ZeroDivisionError("a defect")])
    who = Peer(os.getpid(), os.getuid(), os.getgid())

    def peer(channel: Channel) -> Peer:
        for failure in failures:
            raise failure
        return who

    monkeypatch.setattr(Channel, "peer", property(peer))
    for _ in range(3):
        connection = daemon.raw()
        assert await asyncio.to_thread(connection.recv, 10) == b""
        connection.close()
    await served(daemon)


# --- status ------------------------------------------------------------------------------------------------------------------


async def test_a_status_client_asks_as_often_as_it_likes(daemon: Daemon, store: PosixStore, root: Path) -> None:
    rank, asking = await daemon.client(), await daemon.client("status")
    await rank.ready(root, SHARD)
    await rank.whole_save(1, SHARD)
    await rank.outcome(1)
    status = None
    for _ in range(3):
        await asking.send(wire.Query())
        status = msgspec.json.decode((await asking.next(wire.Report)).status, type=DaemonStatus)
        assert (status.clients, status.pid) == (1, os.getpid())  # a status client has a place of its own
    assert status is not None
    (shown,) = [one for one in status.roots if one.root == str(root)]
    assert [save.phase for save in (*shown.in_flight, *shown.recent)] == ["committed"]
    assert [held.step for held in shown.held] == [1]
    assert status.memory.mapped == daemon.hub.account.used > 0


async def test_a_status_client_may_do_nothing_else(daemon: Daemon, root: Path) -> None:
    asking = await daemon.client("status")
    await asking.send(wire.Join(root=str(root), rank=0, world_size=1))
    assert "may only send queries, and sent a Join" in (await asking.refused()).message
    await asking.ended()


async def test_a_status_client_sends_no_long_frames(daemon: Daemon) -> None:
    asking = await daemon.client("status")
    await asyncio.get_running_loop().sock_sendall(asking.channel._socket, wire.HEAD.pack(wire.MAGIC, 0, 0, 5000))
    assert "announces 5000 bytes" in (await asking.refused()).message


async def test_who_asks_without_a_pause_is_given_the_same_report(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """SERVICE-1: making one takes time from all, and nobody may take all of it."""
    made = 0
    clock = iter(range(1000))

    def counted(hub: Hub) -> DaemonStatus:
        nonlocal made
        made += 1
        return standing(hub)

    monkeypatch.setattr(service_module, "standing", counted)
    monkeypatch.setattr(service_module, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    # The clock moves by one each time that it is read: one report takes 1 s, and is good for 2 s.
    for _ in range(8):
        daemon.service._reported()
    assert made == 4


def exists(path: str) -> bool:
    return os.path.exists(path)


# --- leaving -----------------------------------------------------------------------------------------------------------------


async def test_what_is_in_flight_is_finished_and_its_client_told(
    root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SERVICE-2"""
    held = HeldPersist(monkeypatch)
    async with serving(root.parent, grace_s=60.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.slot(1, SHARD)
        await client.whole_save(1, SHARD)
        await client.phase(1, Phase.PERSISTING)
        daemon.service.leave()
        await daemon.service.leaving()
        await client.whole_save(2, SHARD, slot=1)
        refused = await client.next(wire.Refused)
        assert (refused.save, refused.error.code) == (2, "ClosedError")
        held.go.set()
        await daemon.left()
        assert (await client.outcome(1)).phase == "committed"
        await client.ended()
        assert not exists(daemon.path)


async def test_a_save_that_has_committed_and_still_removes_its_lease_is_waited_for(
    root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SERVICE-2"""
    removing, go, release = asyncio.Event(), asyncio.Event(), HeldLease.release

    async def slow(lease: HeldLease) -> None:
        if "/global_step1/" in lease.key:
            removing.set()
            await go.wait()
        await release(lease)

    monkeypatch.setattr(HeldLease, "release", slow)
    async with serving(root.parent, grace_s=60.0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.whole_save(1, SHARD)
        assert (await client.outcome(1)).phase == "committed"
        await removing.wait()
        daemon.service.leave()
        asyncio.get_running_loop().call_later(0.2, go.set)
        await daemon.left()
    assert go.is_set()
    assert "left in flight" not in caplog.text


async def test_after_the_grace_it_leaves_and_the_save_stays_undecided(
    root: Path, store: PosixStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SERVICE-2, SAVEJOB-3: no vote is cast for it, and its slot is not said to be free, as something may still read it."""
    HeldPersist(monkeypatch)
    async with serving(root.parent, grace_s=0.0, held_bytes_max=0) as daemon:
        client = await daemon.client()
        await client.ready(root, SHARD)
        await client.whole_save(1, SHARD)
        await client.phase(1, Phase.PERSISTING)
        daemon.service.leave()
        await daemon.left()
        await client.ended()
        assert not [message for message in client.heard if isinstance(message, wire.Free)]
    assert "left in flight after 0 s" in caplog.text
    names = [entry.name for entry in await store.list("global_step1/00000001-0")]
    assert "00000.vote" not in names
    assert "outcome" not in names


async def test_it_starts_again_at_the_same_socket(root: Path) -> None:
    for _ in range(2):
        async with serving(root.parent) as daemon:
            await served(daemon)
            path = daemon.path
        assert not exists(path)


async def test_a_second_daemon_at_the_same_socket(daemon: Daemon, root: Path) -> None:
    second = Daemon(root.parent)
    with pytest.raises(UsageError, match="another daemon listens"):
        await second.start()
    await served(daemon)


async def test_its_log_says_who_was_turned_away(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "checkpointd")
    await turned_away(daemon, b"garbage, not a frame\n")
    assert f"process {os.getpid()} (user {os.getuid()}) was turned away: this is not checkpointd's protocol" in caplog.text


def test_the_seals_are_the_systems() -> None:
    """The numbers that the tests seal with are those of the kernel."""
    descriptor = sealed_memfd(b"x" * 4096)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    assert ADD_SEALS == 1033
    os.close(descriptor)


async def test_a_daemon_whose_socket_was_removed_takes_clients_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are there stay, and the new socket is accepted from, each time."""
    monkeypatch.setattr(listener, "LOOK_S", 0.01)
    async with serving(root.parent) as daemon:
        clients = [await daemon.client()]
        for _ in range(2):
            before = _made(daemon.path)
            os.unlink(daemon.path)
            await until(lambda before=before: os.path.exists(daemon.path) and _made(daemon.path) != before)  # type: ignore[misc]
            clients.append(await daemon.client())
        for client in clients:
            await client.send(wire.Ping())
            await client.next(wire.Pong)


def _made(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_ctime_ns
