"""QUERY-1 and QUERY-2: the status clients against a real daemon, and against everything that can be wrong with one."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import checkpointd
from checkpointd.config import ServeConfig
from checkpointd.daemon import query
from checkpointd.daemon import service as service_module
from checkpointd.daemon.protocol import wire
from checkpointd.daemon.protocol.wire import HELLO_BYTES_MAX
from checkpointd.daemon.service import Service
from checkpointd.errors import SidecarError, UsageError
from checkpointd.layout.manifest import ErrorReport
from checkpointd_client.query import AsyncStatusClient, DaemonStatus, StatusClient

Ask: TypeAlias = Callable[[str, float], Awaitable[DaemonStatus]]


async def ask_async(path: str, timeout_s: float) -> DaemonStatus:
    async with AsyncStatusClient(path, timeout_s=timeout_s) as client:
        return await client.status()


async def ask_sync(path: str, timeout_s: float) -> DaemonStatus:
    def ask() -> DaemonStatus:
        with StatusClient(path, timeout_s=timeout_s) as client:
            return client.status()

    return await in_thread(ask)


async def in_thread(call: Callable[[], DaemonStatus]) -> DaemonStatus:
    """On a thread of its own: the loop's own threads end with the daemon."""
    with ThreadPoolExecutor(1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, call)


both = pytest.mark.parametrize("ask", [ask_sync, ask_async], ids=["sync", "async"])


@asynccontextmanager
async def daemon(tmp_path: Path, **settings: Any) -> AsyncIterator[Service]:
    service = Service(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),), grace_s=5, **settings))
    running = asyncio.create_task(service.run())
    await service.ready()
    try:
        yield service
    finally:
        service.leave()
        await running


@asynccontextmanager
async def answering(path: Path, *answers: bytes) -> AsyncIterator[None]:
    """Something that listens at `path`, says one of `answers` for each piece that it hears, and then nothing more."""
    listening: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        listening.append(writer)
        await reader.read(1 << 16)
        for answer in answers:
            writer.write(answer)
        if answers:
            writer.write_eof()

    server = await asyncio.start_unix_server(serve, str(path))
    try:
        yield
    finally:
        server.close()
        for writer in listening:
            writer.close()


def welcome(protocol: int = 1) -> bytes:
    return wire.encode(
        wire.Welcome(
            protocol=protocol,
            release="9.9",
            pid=1,
            frame_bytes_max=wire.FRAME_BYTES_MAX,
            slots_max=1,
            memory_bytes_max=1,
        )
    )


@both
async def test_how_things_stand(tmp_path: Path, ask: Ask) -> None:
    async with daemon(tmp_path) as service:
        service.hub.rank(str(tmp_path / "run1"), 3, world_size=8, pid=77).tally.results["committed"] = 5
        found = await ask(str(tmp_path / "s"), 60.0)
    assert (found.pid, found.socket, found.clients, found.leaving) == (os.getpid(), str(tmp_path / "s"), 0, False)
    [root] = found.roots
    assert root.root == str(tmp_path / "run1")
    assert [(rank.rank, rank.world_size, rank.pid, rank.saves_committed) for rank in root.ranks] == [(3, 8, 77, 5)]


async def test_one_connection_for_many_questions(tmp_path: Path) -> None:
    async with daemon(tmp_path) as service, AsyncStatusClient(str(tmp_path / "s"), timeout_s=60.0) as client:
        answers = await asyncio.gather(*(client.status() for _ in range(20)))
        assert {answer.pid for answer in answers} == {os.getpid()}
        with StatusClient(str(tmp_path / "s"), timeout_s=60.0) as other:
            for _ in range(3):
                await in_thread(other.status)
            assert len(service._connections) == 2
        assert service.hub.refused == 0


@both
async def test_a_report_larger_than_a_hello(tmp_path: Path, ask: Ask) -> None:
    async with daemon(tmp_path) as service:
        for rank in range(1200):
            service.hub.rank(str(tmp_path / "run1"), rank, world_size=1200, pid=1)
        found = await ask(str(tmp_path / "s"), 60.0)
    assert len(found.to_json()) > 25 * HELLO_BYTES_MAX
    assert len(found.roots[0].ranks) == 1200


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_it_can_be_asked_again_when_the_daemon_is_back(tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "s")
    sync, asynchronous = StatusClient(path, timeout_s=60.0), AsyncStatusClient(path, timeout_s=60.0)

    async def ask() -> DaemonStatus:
        return await in_thread(sync.status) if kind == "sync" else await asynchronous.status()

    with pytest.raises(SidecarError, match="there is no such socket"):
        await ask()
    for _ in range(2):
        async with daemon(tmp_path):
            assert (await ask()).pid == os.getpid()
        with pytest.raises(SidecarError):
            await ask()
    sync.close()
    await asynchronous.close()


@both
async def test_nobody_was_ever_there(tmp_path: Path, ask: Ask) -> None:
    with pytest.raises(
        SidecarError,
        match=r"/s cannot be asked: .*there is no such socket.* start it: `checkpointd serve --socket \S+/s --root DIR`",
    ):
        await ask(str(tmp_path / "s"), 60.0)


@both
async def test_the_daemon_has_died(tmp_path: Path, ask: Ask) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / "s"))
    with pytest.raises(SidecarError, match=r"nobody listens there: the daemon has died"):
        await ask(str(tmp_path / "s"), 60.0)


@both
async def test_it_is_no_socket(tmp_path: Path, ask: Ask) -> None:
    (tmp_path / "s").write_text("")
    with pytest.raises(SidecarError, match=r"nobody listens there: .*or this is no socket"):
        await ask(str(tmp_path / "s"), 60.0)


@both
async def test_a_path_that_no_socket_can_have(tmp_path: Path, ask: Ask) -> None:
    with pytest.raises(SidecarError, match="cannot be asked"):
        await ask(str(tmp_path / ("x" * 200)), 60.0)


@pytest.mark.root
def test_the_permission_is_missing(tmp_path: Path) -> None:
    """As another user, since root may open everything."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        path.chmod(0o600)
        code = (
            "import os, sys; from checkpointd.daemon.query import StatusClient, SidecarError\n"
            "os.setuid(65534)\n"
            f"try: StatusClient({str(path)!r}).status()\n"
            "except SidecarError as error: print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "permission is missing: be the user, or in the group" in done.stdout


@both
async def test_the_daemons_own_user_may_ask_a_daemon_that_serves_others(tmp_path: Path, ask: Ask) -> None:
    async with daemon(tmp_path, uids=(os.getuid() + 1,)):
        assert (await ask(str(tmp_path / "s"), 60.0)).pid == os.getpid()


@both
async def test_the_reason_of_a_daemon_that_hung_up_first_is_read(
    tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refused and closed before the question was sent: what was sent fails, and the reason still is there."""
    refused = wire.encode(wire.Refused(error=ErrorReport(code="UsageError", message="user 7 may not use this daemon")))

    def hung_up(*_: object) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.sendall(refused)
        theirs.close()
        ours.setblocking(False)
        return ours

    monkeypatch.setattr(query, "connected", hung_up)
    with pytest.raises(SidecarError, match="refuses: user 7 may not use this daemon"):
        await ask(str(tmp_path / "s"), 60.0)


@both
async def test_too_many_clients(tmp_path: Path, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """SERVICE-4: as many trainers as there may be keep nobody from asking for the status."""
    monkeypatch.setattr(service_module, "STATUS_CLIENTS_MAX", 1)
    async with daemon(tmp_path, clients_max=1), AsyncStatusClient(str(tmp_path / "s"), timeout_s=60.0) as first:
        await first.status()
        with pytest.raises(SidecarError, match=r"all connections for status clients are taken \(1\)"):
            await ask(str(tmp_path / "s"), 60.0)


@both
async def test_the_daemon_hangs(tmp_path: Path, ask: Ask) -> None:
    async with answering(tmp_path / "s"):
        with pytest.raises(SidecarError, match=r"did not answer within 0\.1 s: it is stuck or stopped"):
            await ask(str(tmp_path / "s"), 0.1)


@both
async def test_it_hangs_after_its_welcome(tmp_path: Path, ask: Ask) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(welcome())
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
    with pytest.raises(SidecarError, match="did not answer within"):
        await ask(str(tmp_path / "s"), 0.1)
    server.close()


@both
@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([b"HTTP/1.1 400 Bad Request\r\n\r\n"], "does not speak the protocol of a checkpointd daemon"),
        ([b"\xc7"], "closed the connection"),
        ([welcome(7)], r"is checkpointd 9\.9 and wants protocol 7; this is .*: upgrade the older one"),
        ([wire.encode(wire.Refused(error=ErrorReport(code="WireError", message="speaks 4 to 5")))], "refuses: speaks 4 to 5"),
        ([wire.encode(wire.Report(status="{}"))], "a Report message does not answer"),
        ([welcome(), wire.encode(wire.Free(slot=1))], "a Free message does not answer"),
        ([welcome(), wire.encode(wire.Report(status='{"release": 3}'))], r"checkpointd 9\.9\) cannot be read by this release"),
        ([welcome(), wire.encode(wire.Report(status="no json"))], "cannot be read by this release"),
    ],
    ids=["http", "half", "protocol", "refused", "unasked", "other", "types", "no-json"],
)
async def test_what_answers_is_something_else(tmp_path: Path, ask: Ask, answers: list[bytes], words: str) -> None:
    async with answering(tmp_path / "s", *answers):
        with pytest.raises(SidecarError, match=words):
            await ask(str(tmp_path / "s"), 60.0)


@pytest.mark.parametrize("client", [StatusClient, AsyncStatusClient])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"socket_path": value}, "^socket_path is ") for value in (None, 5, b"s", "", "a\0b")]
    + [({"timeout_s": value}, "^timeout_s is ") for value in (None, "x", 0, -1, math.nan, True, 10**400)]
    + [({"sidecar_uid": value}, "^sidecar_uid is ") for value in ("x", -1, True)],
)
def test_arguments_of_a_status_client_are_checked_by_name(client: type[Any], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        client(**{"socket_path": "s", **arguments})


def test_a_status_client_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import checkpointd_client.query as q; print(q.StatusClient.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "StatusClient"


def test_the_exports_are_all_there_and_nothing_else_is() -> None:
    import checkpointd_client

    assert set(checkpointd_client.__all__) <= set(dir(checkpointd_client))
    assert checkpointd_client.__version__ == checkpointd.__version__
    named = [name for name in checkpointd_client.__all__ if name != "__version__"]
    assert all(getattr(checkpointd_client, name).__name__ == name for name in named)
    with pytest.raises(AttributeError, match="has no attribute 'Chekpointer'"):
        checkpointd_client.Chekpointer  # type: ignore[attr-defined]  # noqa: B018  # the misspelling is the test


def test_a_relative_socket_is_of_the_directory_in_which_the_client_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    client, other = StatusClient("s"), AsyncStatusClient(Path("s"))
    monkeypatch.chdir("/")
    assert client.socket_path == other.socket_path == f"{os.getcwd().rstrip('/')}{tmp_path}/s"
