"""The doctor at a socket: a daemon that is well, and everything else that can lie there."""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from checkpointd import __version__
from checkpointd.config import ServeConfig
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.peers import Peer
from checkpointd.daemon.service import Service
from checkpointd.daemon.status.model import DaemonStatus, MemoryStatus
from checkpointd.doctor import sidecar
from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.doctor.sidecar import DaemonAnswer
from checkpointd.layout.manifest import ErrorReport
from tests.unit.other_user import STRANGER, listen_as

GIB = 1 << 30


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A directory of mode 0700 whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="cd-") as directory:
        yield Path(directory)


@contextmanager
def daemon(config: ServeConfig) -> Iterator[None]:
    """A real one, on a thread of its own."""
    ready, box = threading.Event(), []

    async def serve() -> None:
        service = Service(config)
        box.append((asyncio.get_running_loop(), service))
        running = asyncio.create_task(service.run())
        await service.ready()
        ready.set()
        await running

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        [(loop, service)] = box
        loop.call_soon_threadsafe(service.leave)
        thread.join()


@contextmanager
def listener(path: Path, talk: Callable[[socket.socket], None] = lambda _: None) -> Iterator[None]:
    """Something that listens at `path`, takes one connection, and talks to it."""
    talked = threading.Event()

    def serve() -> None:
        with own.accept()[0] as connection:
            talk(connection)
            talked.wait(60)

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.bind(str(path))
        own.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            talked.set()
            thread.join()


def verdicts(findings: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.level for finding in findings}


def state(nbytes: int) -> StateSize:
    return StateSize(total_bytes=nbytes, node_bytes=nbytes, source="as you say", share_known=True)


def test_a_daemon_that_is_well(socket_folder: Path) -> None:
    config = ServeConfig(socket=str(socket_folder / "d.sock"), roots=(str(socket_folder),))
    with daemon(config):
        os.chmod(config.socket, 0o600)
        findings = sidecar.here(config.socket, state(1 << 20))
    assert verdicts(findings) == dict.fromkeys(
        ("socket-directory", "socket-rights", "daemon", "daemon-user", "daemon-version", "daemon-memory"), "ok"
    )
    assert f"process {os.getpid()} answered" in findings[2].seen


def test_a_daemon_that_does_not_serve_this_user(socket_folder: Path) -> None:
    refused = wire.Refused(error=ErrorReport(code="UsageError", message="user 7 may not use this daemon"))
    path = socket_folder / "d.sock"
    with listener(path, lambda connection: connection.sendall(wire.encode(refused))):
        found = sidecar.ask(str(path), timeout_s=60.0)
    assert isinstance(found, Finding)
    assert found.level == "fail"
    assert "may not use this daemon" in found.seen


def test_a_socket_that_its_daemon_left_when_it_died(socket_folder: Path) -> None:
    path = socket_folder / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.bind(str(path))
    findings = sidecar.here(str(path), None)
    assert findings[-1].check == "daemon"
    assert findings[-1].level == "fail"
    assert "has died" in findings[-1].fix


def test_a_daemon_that_hangs(socket_folder: Path) -> None:
    path = socket_folder / "hung.sock"
    with listener(path):
        found = sidecar.ask(str(path), timeout_s=0.05)
    assert isinstance(found, Finding)
    assert found.level == "fail"
    assert "stuck" in found.fix


def test_one_that_closes_without_a_word(socket_folder: Path) -> None:
    path = socket_folder / "shut.sock"
    with listener(path, lambda connection: connection.shutdown(socket.SHUT_RDWR)):
        found = sidecar.ask(str(path), timeout_s=60.0)
    assert isinstance(found, Finding)
    assert "without an answer" in found.seen


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak the protocol of a checkpointd daemon"),
        (wire.encode(wire.Query()), "a Query message does not answer"),
        (
            wire.encode(wire.Refused(error=ErrorReport(code="WireError", message="upgrade the older one"))),
            "upgrade the older one",
        ),
    ],
    ids=["another protocol", "another message", "refusal"],
)
def test_something_else_that_listens_there(socket_folder: Path, answer: bytes, words: str) -> None:
    path = socket_folder / "other.sock"
    with listener(path, lambda connection: connection.sendall(answer)):
        found = sidecar.ask(str(path), timeout_s=60.0)
    assert isinstance(found, Finding)
    assert found.level == "fail"
    assert words in found.seen


# --- the socket as a file ----------------------------------------------------------------------------------------


def test_nothing_at_the_path_and_no_directory(socket_folder: Path) -> None:
    found = sidecar.here(str(socket_folder / "none.sock"), None)
    assert verdicts(found) == {"socket-directory": "ok", "socket-rights": "fail"}
    assert "checkpointd serve" in found[-1].fix
    assert sidecar.socket_directory(str(socket_folder / "no" / "d.sock"), None).level == "fail"


def test_a_file_that_is_no_socket(socket_folder: Path) -> None:
    (socket_folder / "d.sock").write_text("")
    assert "is not a socket" in sidecar.socket_rights(str(socket_folder / "d.sock")).seen


def test_a_path_that_linux_does_not_take(socket_folder: Path) -> None:
    assert sidecar.socket_rights(f"{socket_folder}/{'n' * 120}").level == "fail"


@pytest.mark.parametrize(("mode", "level"), [(0o700, "ok"), (0o750, "ok"), (0o777, "fail"), (0o770, "fail"), (0o1777, "fail")])
def test_rights_of_the_directory(socket_folder: Path, mode: int, level: str) -> None:
    os.chmod(socket_folder, mode)
    assert sidecar.socket_directory(str(socket_folder / "d.sock"), None).level == level
    os.chmod(socket_folder, 0o700)


@pytest.mark.parametrize(("mode", "level"), [(0o600, "ok"), (0o660, "ok"), (0o666, "warn")])
def test_rights_of_the_socket(socket_folder: Path, mode: int, level: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.bind(str(socket_folder / "d.sock"))
    os.chmod(socket_folder / "d.sock", mode)
    assert sidecar.socket_rights(str(socket_folder / "d.sock")).level == level


@pytest.mark.root
def test_a_directory_that_belongs_to_somebody_else(socket_folder: Path) -> None:
    os.chown(socket_folder, 65534, -1)
    assert sidecar.socket_directory(str(socket_folder / "d.sock"), None).level == "fail"
    assert sidecar.socket_directory(str(socket_folder / "d.sock"), 65534).level == "ok"


@pytest.mark.root
def test_a_stranger_who_answers(socket_folder: Path) -> None:
    path = socket_folder / "d.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.bind(str(path))
        listen_as(STRANGER, own)
        [*_, found] = sidecar.here(str(path), None)
    assert (found.check, found.level) == ("daemon", "fail")
    assert f"user {STRANGER} (process " in found.seen
    assert f"--sidecar-uid {STRANGER}" in found.fix


# --- what it answers ---------------------------------------------------------------------------------------------

STATUS = DaemonStatus(
    release=__version__,
    host="node1",
    pid=1,
    socket="/run/d.sock",
    started_at=0.0,
    now=1.0,
    clients=2,
    clients_max=256,
    refused=0,
    leaving=False,
    memory=MemoryStatus(mapped=0, mapped_max=100 * GIB, held=0, held_max=50 * GIB),
    bandwidth_bps=None,
    roots=(),
)


def answer(status: DaemonStatus = STATUS, *, uid: int = 1000, pid: int = 7, release: str = __version__) -> DaemonAnswer:
    return DaemonAnswer(Peer(pid, uid, 100), 1, msgspec.structs.replace(status, release=release))


def test_a_daemon_that_leaves_or_is_full() -> None:
    assert sidecar.daemon(answer()).level == "ok"
    assert sidecar.daemon(answer(msgspec.structs.replace(STATUS, leaving=True))).level == "warn"
    assert "--clients" in sidecar.daemon(answer(msgspec.structs.replace(STATUS, clients=256))).fix


def test_another_user_than_the_sockets_owner() -> None:
    assert sidecar.daemon_user(answer(uid=1000), 1000).level == "ok"
    assert sidecar.daemon_user(answer(uid=1000), 0).level == "warn"
    assert "another pid namespace" in sidecar.daemon_user(answer(pid=0), 1000).seen


def test_another_release() -> None:
    assert sidecar.daemon_version(answer()).level == "ok"
    found = sidecar.daemon_version(answer(release="9.9.9"))
    assert found.level == "note"
    assert "9.9.9" in found.seen


@pytest.mark.parametrize(("nbytes", "level"), [(50 * GIB, "ok"), (51 * GIB, "warn")])
def test_memory_for_two_snapshots(nbytes: int, level: str) -> None:
    assert sidecar.daemon_memory(answer(), state(nbytes)).level == level


def test_memory_that_holds_nothing_for_restarts() -> None:
    memory = MemoryStatus(mapped=0, mapped_max=100 * GIB, held=0, held_max=0)
    found = sidecar.daemon_memory(answer(msgspec.structs.replace(STATUS, memory=memory)), state(GIB))
    assert found.level == "note"
    assert "--held-mib" in found.fix
    assert sidecar.daemon_memory(answer(), None).level == "ok"
