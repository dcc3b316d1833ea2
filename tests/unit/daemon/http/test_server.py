"""HTTP-1 to HTTP-3, HTTPBOUND-1 and HTTPBOUND-2: what is served, to whom, and within which bounds."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import stat
from pathlib import Path

import aiohttp
import msgspec
import pytest

from checkpointd.config import ServeConfig
from checkpointd.daemon.http import server
from checkpointd.daemon.http.address import is_loopback_host, parse_address
from checkpointd.daemon.http.server import serving
from checkpointd.daemon.hub import Hub
from checkpointd.daemon.process.logs import SAID_MAX
from checkpointd.daemon.protocol import listener
from checkpointd.daemon.protocol.listener import door_at
from checkpointd.daemon.status.model import DaemonStatus
from checkpointd.errors import SidecarError, UsageError
from tests.unit.daemon.example_statuses import busy

ANY = "127.0.0.1:0"


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),)))


def public(tmp_path: Path) -> Hub:
    return Hub(ServeConfig(socket=str(tmp_path / "s"), roots=(str(tmp_path),), http_public=True))


@pytest.fixture
async def client() -> aiohttp.ClientSession:  # type: ignore[misc]
    async with aiohttp.ClientSession() as session:
        yield session


async def connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    port = int(url.rstrip("/").rpartition(":")[2])
    return await asyncio.open_connection("127.0.0.1", port)


async def raw(url: str, request: bytes) -> bytes:
    """What comes back for these bytes until the server closes the connection."""
    reader, writer = await connected(url)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


# --- what is served ------------------------------------------------------------------------------------------


async def test_the_status_as_json(hub: Hub, client: aiohttp.ClientSession) -> None:
    hub.rank("/r", 1, world_size=2, pid=9)
    async with serving(hub, ANY) as url, client.get(f"{url}api/status") as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        found = msgspec.json.decode(await answer.read(), type=DaemonStatus)
    assert (found.pid, [root.root for root in found.roots]) == (os.getpid(), ["/r"])


async def test_the_metrics(hub: Hub, client: aiohttp.ClientSession) -> None:
    async with serving(hub, ANY) as url:
        async with client.get(f"{url}metrics") as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert "checkpointd_clients 0.0" in await answer.text()
        async with client.get(f"{url}metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await answer.text()).endswith("# EOF\n")


async def test_health_tells_serving_from_leaving(hub: Hub, client: aiohttp.ClientSession) -> None:
    async with serving(hub, ANY) as url:
        async with client.get(f"{url}healthz") as answer:
            assert (answer.status, await answer.text()) == (200, "serving\n")
        hub.leaving = True
        async with client.get(f"{url}healthz") as answer:
            assert answer.status == 503
            assert "leaving" in await answer.text()


async def test_the_page_and_all_that_it_names(hub: Hub, client: aiohttp.ClientSession) -> None:
    async with serving(hub, ANY) as url:
        async with client.get(url) as answer:
            assert (answer.status, answer.content_type) == (200, "text/html")
        names = [entry.name for entry in (Path(server.__file__).parent / "page").iterdir() if entry.name != "index.html"]
        kinds = set()
        for name in names:
            async with client.get(f"{url}page/{name}") as answer:
                assert answer.status == 200
                kinds.add(answer.content_type)
    assert kinds == {"text/css", "text/javascript", "image/svg+xml"}


@pytest.mark.parametrize("path", ["nothing", "page/", "page/../server.py", "page/%2e%2e/http.py", "page/..%2fhttp.py", "api/"])
async def test_nothing_else_is_served(hub: Hub, path: str) -> None:
    async with serving(hub, ANY) as url:
        answer = await raw(url, f"GET /{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"Content-Security-Policy: default-src 'none'" in answer


async def test_head_has_no_body(hub: Hub, client: aiohttp.ClientSession) -> None:
    async with serving(hub, ANY) as url, client.head(f"{url}api/status") as answer:
        assert answer.status == 200
        assert await answer.read() == b""


# --- HTTP-1: read-only -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "api/status", "metrics", "healthz", "nothing"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
async def test_other_methods_are_refused(hub: Hub, client: aiohttp.ClientSession, method: str, path: str) -> None:
    async with serving(hub, ANY) as url, client.request(method, url + path) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


async def test_a_body_is_not_read(hub: Hub) -> None:
    """The answer comes though the body never does."""
    async with serving(hub, ANY) as url:
        for how in ("Content-Length: 1000000000", "Transfer-Encoding: chunked"):
            answer = await raw(url, f"GET /api/status HTTP/1.1\r\nHost: localhost\r\n{how}\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 413 ")


# --- HTTP-2: who may ask -----------------------------------------------------------------------------------------


async def test_a_page_from_elsewhere_learns_nothing(hub: Hub, client: aiohttp.ClientSession) -> None:
    """DNS rebinding: the browser believes that evil.example is this machine, and says so in Host."""
    async with serving(hub, ANY) as url:
        for host in ("evil.example", "evil.example:80", "10.0.0.1", "localhost.evil.example", "127.0.0.1.evil.example"):
            async with client.get(f"{url}api/status", headers={"Host": host}) as answer:
                assert answer.status == 421
                assert "pid" not in await answer.text()
        for host in ("localhost", "LOCALHOST:9733", "127.0.0.1:1", "[::1]:80", "tunnel.localhost"):
            async with client.get(f"{url}api/status", headers={"Host": host}) as answer:
                assert answer.status == 200
        answer_without = await raw(url, b"GET /api/status HTTP/1.0\r\n\r\n")
    assert answer_without.startswith((b"HTTP/1.0 421 ", b"HTTP/1.1 421 "))


@pytest.mark.parametrize(
    "host", ["", ":80", "evil", "1.2.3.4", "[::2]", "localhost@evil", "localhost:80:80", "127.0.0.1:x", " localhost"]
)
def test_hosts_that_are_not_this_machine(host: str) -> None:
    assert not is_loopback_host(host)


async def test_answers_carry_what_keeps_browsers_in(hub: Hub, client: aiohttp.ClientSession) -> None:
    async with serving(hub, ANY) as url:
        for path in ("", "api/status", "nothing"):
            async with client.get(url + path, headers={"Origin": "https://evil.example"}) as answer:
                policy = answer.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                assert "http" not in policy
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
                assert answer.headers["Cache-Control"] == "no-store"
                assert answer.headers["Server"] == "checkpointd"
                assert not [name for name in answer.headers if name.startswith("Access-Control-")]


@pytest.mark.parametrize("address", ["0.0.0.0:0", ":0", "[::]:0", "192.0.2.7:0"])
async def test_other_machines_are_let_in_only_where_it_was_said(hub: Hub, address: str) -> None:
    with pytest.raises(UsageError, match=r"other machines may reach.*--http-public"):
        async with serving(hub, address):
            raise AssertionError("it serves")


async def test_public_is_served_under_any_name(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    async with serving(public(tmp_path), "0.0.0.0:0") as url:
        port = url.rstrip("/").rpartition(":")[2]
        assert url == f"http://0.0.0.0:{port}/"
        async with client.get(f"http://127.0.0.1:{port}/healthz", headers={"Host": "node-17.cluster"}) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    "address", ["localhost", "9733", "http://localhost:1", "localhost:70000", "::1:80", "a b:80", "[::1]", ""]
)
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(UsageError, match="give HOST:PORT"):
        parse_address(address)


async def test_addresses_that_can_be(hub: Hub, client: aiohttp.ClientSession) -> None:
    for address in ("localhost:0", "127.0.0.2:0"):
        async with serving(hub, address) as url, client.get(f"{url}healthz") as answer:
            assert answer.status == 200
            assert url.startswith(f"http://{address[:-2]}:")
    assert parse_address("[::1]:80") == ("::1", 80)


async def test_an_address_that_is_taken(hub: Hub) -> None:
    async with serving(hub, ANY) as url:
        with pytest.raises(SidecarError, match=r"cannot serve HTTP at .*Address already in use: another process listens there"):
            async with serving(hub, url.removeprefix("http://").rstrip("/")):
                raise AssertionError("it serves")


async def test_a_host_that_nobody_knows(hub: Hub) -> None:
    with pytest.raises(UsageError, match=r"'nowhere\.invalid' is not a host that this machine knows"):
        async with serving(hub, "nowhere.invalid:80"):
            raise AssertionError("it serves")


async def test_a_unix_socket_is_its_owners_alone(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "http"
    async with serving(hub, str(path)) as url:
        assert url == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession(connector=connector) as client, client.get("http://any/api/status") as answer:
            assert json.loads(await answer.read())["pid"] == os.getpid()
    assert not path.exists()


async def test_a_unix_socket_that_was_removed_is_bound_anew(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is connected stays, and the new socket is answered at, each time."""
    monkeypatch.setattr(listener, "LOOK_S", 0.01)
    path = tmp_path / "http"
    async with serving(hub, str(path)):
        stayed = await asyncio.open_unix_connection(str(path))
        await still_answers(*stayed)
        for _ in range(2):
            path.unlink()
            async with asyncio.timeout(60):
                while not path.exists():
                    await asyncio.sleep(0)
            came = await asyncio.open_unix_connection(str(path))
            await still_answers(*came)
            came[1].close()
        await still_answers(*stayed)
        stayed[1].close()
    assert not path.exists()


async def still_answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: any\r\n\r\n")
    await reader.readuntil(b"\r\n\r\nserving\n")


async def test_a_unix_socket_that_is_in_use(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is the daemon's own socket"):
        async with serving(hub, hub.config.socket):
            raise AssertionError("it serves")
    with door_at(str(tmp_path / "http"), None), pytest.raises(UsageError, match="another daemon listens"):
        async with serving(hub, str(tmp_path / "http")):
            raise AssertionError("it serves")


# --- bounds --------------------------------------------------------------------------------------------------


async def test_many_viewers_cost_one_look(hub: Hub, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Hub] = []

    def look(seen: Hub) -> DaemonStatus:
        looks.append(seen)
        return busy(2)

    monkeypatch.setattr(server, "FRESH_S", 3600.0)
    async with serving(hub, ANY, look=look) as url:
        answers = await asyncio.gather(*(client.get(f"{url}api/status") for _ in range(20)))
        bodies = {await answer.read() for answer in answers}
        assert (len(looks), len(bodies)) == (1, 1)
        monkeypatch.setattr(server, "FRESH_S", -1.0)
        for _ in range(2):
            async with client.get(f"{url}api/status"):
                pass
    assert len(looks) == 3


SLOW = {
    "say nothing": b"",
    "send half a request": b"GET /healthz HTTP/1.1\r\nHost: loc",
    "have been served": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("sent", SLOW.values(), ids=SLOW)
async def test_httpbound_1_as_many_as_there_may_be_keep_nobody_out(hub: Hub, sent: bytes) -> None:
    """The one that has been there for longest goes."""
    async with serving(hub, ANY, connections_max=4) as url:
        slow = [await connected(url) for _ in range(4)]
        for _, writer in slow:
            writer.write(sent)
        for _ in range(4):
            answer = await raw(url, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
        await rest(slow[0][0])
        for _, writer in slow:
            writer.close()


async def test_httpbound_2_a_request_that_trickles_in(hub: Hub) -> None:
    """Its time is counted from its first byte."""
    async with serving(hub, ANY, idle_s=60.0, head_s=0.05) as url:
        reader, writer = await connected(url)
        ended = asyncio.create_task(rest(reader))
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        while not ended.done():
            writer.write(b"x: y\r\n")
            await asyncio.sleep(0.002)
        assert ended.result() == b""
        writer.close()


async def test_requests_that_cannot_be_read_make_no_tracebacks(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    """And few lines: 1.2 MB a second once went into the log."""
    caplog.set_level(logging.INFO)
    async with serving(hub, ANY) as url:
        for _ in range(20):
            answer = await raw(url, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\r\n " + b"\x1b[31mforged" * 100 + b"\r\n\r\n")
            assert b" 400 " in answer.splitlines()[0]
    said = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert 1 <= len(said) <= SAID_MAX
    assert not any(record.exc_info for record in said)
    assert {record.name for record in said} == {"checkpointd"}


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the connection is closed, or cut off."""
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: loc"], ids=["nothing", "half a request"])
async def test_httpbound_2_a_request_that_does_not_end(hub: Hub, sent: bytes) -> None:
    async with serving(hub, ANY, idle_s=0.1, head_s=0.1) as url:
        reader, writer = await connected(url)
        writer.write(sent)
        assert await rest(reader) == b""
        writer.close()


async def test_httpbound_2_an_answer_that_nobody_reads(hub: Hub) -> None:
    async with serving(hub, ANY, idle_s=0.2, look=lambda _: busy(256, saves=16)) as url:
        _, writer = await connected(url)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not writer.transport.is_closing():  # which is seen at a write, once the daemon has cut it off
            writer.write(b"GET /api/status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await asyncio.sleep(0.05)


async def test_head_lines_are_bounded(hub: Hub) -> None:
    async with serving(hub, ANY) as url:
        answer = await raw(url, b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 "))
        answer = await raw(url, b"no http at all\r\n\r\n")
        assert b" 400 " in answer.splitlines()[0]


async def test_a_defect_is_an_answer_and_a_word_in_the_log(
    hub: Hub, client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture
) -> None:
    def look(_: Hub) -> DaemonStatus:
        raise RuntimeError("boom")

    async with serving(hub, ANY, look=look) as url:
        async with client.get(f"{url}api/status") as answer:
            assert answer.status == 500
            assert "boom" not in await answer.text()
        async with client.get(f"{url}healthz") as answer:
            assert answer.status == 200
    assert "GET /api/status failed in an unforeseen way" in caplog.text
