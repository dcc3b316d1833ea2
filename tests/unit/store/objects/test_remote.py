"""The client of a real bucket: what it does where its parts, the client in Rust and botocore, would go wrong."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from weakref import WeakSet

import pytest
from obstore import exceptions

from checkpointd.bucket_urls import parse
from checkpointd.cli import program
from checkpointd.errors import NotFoundError, StoreError, UnreadableError
from checkpointd.store import open_store
from checkpointd.store.objects import remote
from checkpointd.store.objects.failures import store_error
from checkpointd.store.objects.remote import REQUESTS_AT_ONCE, RemoteBucket
from checkpointd.store.uploads import abort_upload_of, unfinished_uploads_of
from checkpointd.system_errors import lasts
from checkpointd_client import open_checkpoint
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.fixtures import Place, root_at
from tests.servers.s3_operations import operation
from tests.servers.s3_server import free_ports

FORKED = """
import asyncio, os, signal, sys
from checkpointd.errors import UsageError
from checkpointd.store import open_store

async def look():
    async with open_store(sys.argv[1]) as store:
        return await store.stat("x")

asyncio.run(look())
if not os.fork():
    signal.alarm(60)
    try:
        asyncio.run(look())
    except UsageError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
"""


class Google(BaseHTTPRequestHandler):
    """As much of Google Cloud Storage as puts and removes objects."""

    protocol_version = "HTTP/1.1"
    objects: set[str]

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.objects.add(self.path)
        self._answer(200)

    def do_DELETE(self) -> None:
        self._answer(204 if self.path in self.objects else 404)
        self.objects.discard(self.path)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Google]]:
    monkeypatch.setattr(Google, "objects", set(), raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Google) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        key = {"gcs_base_url": f"http://127.0.0.1:{server.server_port}", "disable_oauth": True}
        key |= {"client_email": "", "private_key": "", "private_key_id": ""}
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        yield Google
        server.shutdown()
        thread.join()


async def test_store_5_google_removes_the_objects_beside_one_that_is_not_there(google: type[Google]) -> None:
    """Its client stops at the first one that is missing."""
    keys = [f"key-{number:02}" for number in range(30)]
    async with open_store("gs://bucket/run1?retry_s=2") as store:
        for key in keys:
            await store.put(key, b"x")
        assert len(google.objects) == 30
        await store.delete_each(["missing", *keys[:20], "missing too", *keys[20:]])
        await store.delete("missing")
    assert google.objects == set()


def test_a_forked_process_says_that_it_cannot_use_the_bucket(seaweed_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's threads do not come along, so its requests would never end."""
    root = root_at(seaweed_place, monkeypatch)
    done = subprocess.run([sys.executable, "-c", FORKED, root], capture_output=True, text=True)
    assert "spawn" in done.stdout, done.stderr


async def test_without_botocore_there_are_no_unfinished_uploads(
    seaweed_place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = RemoteBucket(parse(root_at(seaweed_place, monkeypatch)))
    for name in [name for name in sys.modules if name.partition(".")[0] == "botocore"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert await bucket.unfinished() == []


async def test_however_many_ask_at_once_few_requests_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a connection: a trainer whose saves fail at once would have thousands."""
    under_way = most = 0

    async def missing() -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        raise FileNotFoundError("Object at location x not found: 404 Not Found")

    monkeypatch.setattr(remote.obstore, "get_async", lambda *_, **__: asyncio.ensure_future(missing()))
    bucket = RemoteBucket(parse("s3://bucket/run?anonymous=true"))
    found = await asyncio.gather(*(bucket.look(f"t/{number}") for number in range(3 * REQUESTS_AT_ONCE)))
    assert found == [None] * (3 * REQUESTS_AT_ONCE)
    assert most == REQUESTS_AT_ONCE


async def test_this_side_pays_for_all_requests_of_unfinished_uploads(
    moto_place: Place, moto_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(root_at(moto_place, monkeypatch, endpoint=moto_proxy.endpoint, requester_pays="true")) as store:
        writer = await store.open_writer("large")
        await writer.write_at(0, bytes(9 << 20))
        for upload in await unfinished_uploads_of(store):
            await abort_upload_of(store, upload)
        await writer.discard()
    asked = [one.request for one in moto_proxy.journal.entries]
    assert [operation(one) for one in asked if "x-amz-request-payer" not in one.headers] == []
    assert "ListMultipartUploads" in map(operation, asked)


@pytest.fixture
def away() -> str:
    """A root at a port where nobody listens."""
    return f"s3://bucket/run1?anonymous=true&endpoint=http://127.0.0.1:{free_ports(1)[0]}&retry_s=0.2"


async def test_a_server_that_is_away_is_named_with_the_reason(away: str) -> None:
    endpoint = parse(away).options["endpoint"]
    async with open_store(away) as store:
        with pytest.raises(UnreadableError, match=rf"\(Connection refused\): {endpoint} was not reached"):
            await store.get("latest")


def test_a_request_that_failed_does_not_hold_up_the_end_of_the_process(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_under_way", WeakSet())  # without those of other tests

    async def failure() -> UnreadableError:
        async with open_store(away) as store:
            with pytest.raises(UnreadableError) as caught:
                await store.list("")
        return caught.value

    kept = asyncio.run(failure())
    assert kept.__traceback__ is not None
    remote._rest()
    assert not list(remote._under_way)


async def test_a_server_that_is_silent_is_told_once_for_all_requests(
    away: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(remote, "FIRST_REPORT_S", 0.0)
    async with open_store(away) as store:
        for key in ("latest", "t/a/outcome"):
            with pytest.raises(UnreadableError):
                await store.get(key)
    said = [record.getMessage() for record in caplog.records if record.name == "checkpointd.waits"]
    assert said == ["s3://bucket/run1 has not answered for 0 s; a request is repeated for 0.2 s (the option retry_s)"]


async def test_a_server_that_refuses_each_try_is_told_too(
    away: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The client does not repeat a conditional request, so none of them waits for long."""
    monkeypatch.setattr(remote, "FIRST_REPORT_S", 0.5)
    async with open_store(away.replace("retry_s=0.2", "retry_s=600")) as store:
        putting = asyncio.ensure_future(store.put_if_absent("latest", b"1"))
        while "has not answered for" not in caplog.text:
            await asyncio.sleep(0.01)
        assert not putting.done()
        putting.cancel()
        await asyncio.wait({putting})
    assert [record.name for record in caplog.records].count("checkpointd.waits") == 1
    async with open_store(away) as store:
        with pytest.raises(StoreError, match="was not reached"):
            await store.put_if_absent("latest", b"1")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_command_tells_people_what_it_waits_for(
    away: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "FIRST_REPORT_S", 0.0)
    log = logging.getLogger("checkpointd")
    monkeypatch.setattr(log, "handlers", [])
    assert program.run(["list", away, *(["--json"] if as_json else [])]) == UnreadableError.exit_code
    first = capfd.readouterr().err.splitlines()[0]
    assert first.startswith('{"error"' if as_json else "s3://bucket/run1 has not answered for")


def test_a_server_that_was_never_reached_is_not_waited_for(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens the root has the answer after one request, and that is not repeated for `retry_s`."""
    monkeypatch.setattr(remote, "FIRST_RETRY_S", 0.2)
    asked: list[str] = []
    get = RemoteBucket.get

    async def counted(bucket: RemoteBucket, key: str, size_max: int) -> object:
        asked.append(key)
        return await get(bucket, key, size_max)

    monkeypatch.setattr(RemoteBucket, "get", counted)
    with pytest.raises(UnreadableError, match=r"\(Connection refused\)") as raised:
        open_checkpoint(away.removesuffix("&retry_s=0.2"), timeout_s=3600.0)
    assert lasts(raised.value)
    assert asked == ["log/root"]


async def test_a_server_that_has_answered_once_is_waited_for() -> None:
    async def absent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(absent, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with open_store(f"s3://bucket/run1?anonymous=true&endpoint=http://{host}:{port}&retry_s=0.2") as store:
        with pytest.raises(NotFoundError):
            await store.get("latest")
        server.close()
        await server.wait_closed()
        with pytest.raises(UnreadableError) as raised:
            await store.get("latest")
        assert not lasts(raised.value)


@pytest.mark.parametrize("words", ["NoSuchBucket", "403 Forbidden"])
def test_what_lasts_at_a_server_is_known_as_at_a_file_system(words: str) -> None:
    error = exceptions.GenericError(f"Error: status code: {words}")
    told = store_error("reading", "latest", "s3://bucket/run1", error, reads=True)
    told.__cause__ = error
    assert lasts(told)
