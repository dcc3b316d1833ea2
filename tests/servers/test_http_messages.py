"""Bodies of every framing, as a proxy passes them on: byte for byte, a piece at a time."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from urllib.parse import urlsplit

import pytest

from tests.servers.faults import SLOW_DOWN, Slow, Twice
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.http_messages import ReplyHead, RequestHead, read_head

LARGE = 64 << 20
HELD_MAX = 8 << 20
CHUNKED = b"5\r\nhello\r\n10;note=x\r\n0123456789abcdef\r\n0\r\nTrailer: x\r\n\r\n"


def reader_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=1 << 16)
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def whole(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"PUT /a/b HTTP/1.1\r\nContent-Length: 5\r\n\r\n", b"hello"),
        (b"GET /a/b HTTP/1.1\r\n\r\n", b""),
        (b"PUT /a/b HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n", CHUNKED),
    ],
    ids=["counted", "none", "chunked"],
)
async def test_the_body_of_a_request_ends_where_the_next_one_begins(head: bytes, body: bytes) -> None:
    reader = reader_of(head + body + b"GET /next HTTP/1.1\r\n\r\n")
    request = RequestHead(await read_head(reader))
    assert request.raw == head
    assert await whole(request.body(reader)) == body
    assert RequestHead(await read_head(reader)).path == "/next"
    assert await read_head(reader) == b""


@pytest.mark.parametrize(
    ("head", "method", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "GET", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", "HEAD", b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "GET", CHUNKED),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "DELETE", b""),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", "GET", b""),
        (b"HTTP/1.1 200 OK\r\n\r\n", "GET", b"until the end"),
    ],
    ids=["counted", "head", "chunked", "204", "304", "until the end"],
)
async def test_the_body_of_a_reply_depends_on_the_request(head: bytes, method: str, body: bytes) -> None:
    reader = reader_of(head + body)
    reply = ReplyHead(await read_head(reader))
    assert await whole(reply.body(reader, method)) == body
    assert reply.until_close == (body == b"until the end")


@pytest.mark.parametrize("body", [b"hell", b""], ids=["counted", "nothing"])
async def test_a_body_that_ends_early_is_no_body(body: bytes) -> None:
    reader = reader_of(b"PUT /a/b HTTP/1.1\r\nContent-Length: 5\r\n\r\n" + body)
    request = RequestHead(await read_head(reader))
    with pytest.raises(EOFError):
        await whole(request.body(reader))


async def test_a_head_that_ends_early_is_no_head() -> None:
    with pytest.raises(EOFError):
        await read_head(reader_of(b"PUT /a/b HTTP/1.1\r\nContent-"))


class Mirror(BaseHTTPRequestHandler):
    """Takes bodies of either framing, and gives the last one back in chunks."""

    protocol_version = "HTTP/1.1"
    body = b""
    reads = threading.Event()
    """Cleared, it takes no body."""

    def do_PUT(self) -> None:
        self.reads.wait(60)
        if "Content-Length" in self.headers:
            count = int(self.headers["Content-Length"])
            got = sum(len(self.rfile.read(min(count - at, 1 << 16))) for at in range(0, count, 1 << 16))
            assert got == count
        else:
            pieces = []
            while size := int(self.rfile.readline(), 16):
                pieces.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            Mirror.body = b"".join(pieces)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for at in range(0, len(self.body), 10_000):
            piece = self.body[at : at + 10_000]
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[FaultyProxy]:
    Mirror.reads.set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        with FaultyProxy(f"http://127.0.0.1:{server.server_address[1]}") as proxy:
            yield proxy
        server.shutdown()
        thread.join()


@pytest.fixture
def connection(proxy: FaultyProxy) -> Iterator[http.client.HTTPConnection]:
    url = urlsplit(proxy.endpoint)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=60)
    yield connection
    connection.close()


@pytest.mark.parametrize("fault", [None, Slow(1 << 20), Twice()], ids=str)
def test_chunks_go_both_ways_on_one_connection(
    proxy: FaultyProxy, connection: http.client.HTTPConnection, fault: Slow | Twice | None
) -> None:
    if fault is not None:
        proxy.add(fault, times=2)
    body = os.urandom(123_457)
    connection.request("PUT", "/bucket/key", iter([body[:7], body[7:100_000], body[100_000:]]), encode_chunked=True)
    response = connection.getresponse()
    assert (response.status, response.read()) == (200, b"")
    assert connection.sock is not None, "the connection was closed"
    mine = connection.sock.getsockname()
    connection.request("GET", "/bucket/key")
    assert connection.getresponse().read() == body
    assert connection.sock is not None
    assert connection.sock.getsockname() == mine


def test_a_large_body_is_never_held(proxy: FaultyProxy, connection: http.client.HTTPConnection) -> None:
    """The server takes none of it at first: then the client has to wait."""
    Mirror.reads.clear()
    connection.connect()
    assert connection.sock is not None
    connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    tracemalloc.start()
    try:
        piece = bytes(1 << 16)
        connection.putrequest("PUT", "/bucket/key")
        connection.putheader("Content-Length", str(LARGE))
        connection.endheaders()
        proxy.journal.wait_until(lambda: proxy.forwarded["PutObject"] == 1)
        release = threading.Timer(0.3, Mirror.reads.set)
        release.start()
        for each in repeat(piece, LARGE // len(piece)):
            connection.send(each)
        assert connection.getresponse().status == 200
        release.join()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < HELD_MAX, f"{peak >> 20} MiB"


def send_raw(proxy: FaultyProxy, head: bytes) -> socket.socket:
    url = urlsplit(proxy.endpoint)
    connection = socket.create_connection((url.hostname, url.port), timeout=60)
    connection.sendall(head)
    return connection


def test_a_refused_head_has_no_body(proxy: FaultyProxy) -> None:
    proxy.add(SLOW_DOWN)
    head = b"HEAD /bucket/key HTTP/1.1\r\nConnection: close\r\n\r\n"
    with send_raw(proxy, head) as connection, connection.makefile("rb") as answers:
        text = answers.read()
    assert text.startswith(b"HTTP/1.1 503 ")
    assert text.index(b"\r\n\r\n") == len(text) - 4


PUT = b"PUT /bucket/key HTTP/1.1\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"


@pytest.mark.parametrize("fault", [None, Twice()], ids=str)
def test_leave_to_send_a_body_is_passed_on_once(proxy: FaultyProxy, fault: Twice | None) -> None:
    if fault is not None:
        proxy.add(fault)
    with send_raw(proxy, PUT) as connection, connection.makefile("rb") as answers:
        assert answers.readline().startswith(b"HTTP/1.1 100 ")
        assert answers.readline() == b"\r\n"
        connection.sendall(b"hello")
        assert answers.readline().startswith(b"HTTP/1.1 200 ")


def test_who_is_refused_need_not_send_the_body(proxy: FaultyProxy) -> None:
    proxy.add(SLOW_DOWN)
    with send_raw(proxy, PUT) as connection, connection.makefile("rb") as answers:
        text = answers.read()
    assert text.startswith(b"HTTP/1.1 503 ")
    assert b"Connection: close" in text
    assert text.endswith(b"</Error>")


def test_a_server_may_answer_before_it_has_the_body() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with listener, FaultyProxy(f"http://127.0.0.1:{listener.getsockname()[1]}") as proxy:

        def answer_at_once() -> None:
            server, _ = listener.accept()
            with server:
                server.recv(1 << 16)
                server.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\nConnection: close\r\n\r\nlong")
                proxy.journal.wait_until(lambda: proxy.journal.entries[0].client == "400")

        thread = threading.Thread(target=answer_at_once)
        thread.start()
        client = http.client.HTTPConnection("127.0.0.1", urlsplit(proxy.endpoint).port, timeout=60)
        client.request("PUT", "/bucket/key", bytes(LARGE))
        response = client.getresponse()
        assert (response.status, response.read()) == (400, b"long")
        client.close()
        thread.join()
