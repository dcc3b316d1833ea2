"""`checkpointd doctor` on buckets that are unfit in earnest, and what a job says that starts there."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from urllib.parse import quote

import pytest

from checkpointd.doctor.bucket import speed
from checkpointd.doctor.examine import Question, examine
from checkpointd.doctor.finding import Finding
from checkpointd.errors import ConditionsIgnoredError, StoreError
from tests.servers.careless_proxy import CarelessProxy
from tests.servers.fixtures import Place, root_at
from tests.servers.s3_requests import send

pytestmark = pytest.mark.nightly

torch = pytest.importorskip("torch")

TRIED = {
    *("bucket", "root", "rights", "create-once", "replace-seen", "marks", "ranges", "listing", "names", "clock"),
    *("multipart", "unfinished-uploads", "latency", "throughput", "lifecycle", "versioning", "retention", "encryption"),
}
NOT_OF_BUCKETS = {"file-system", "mount-options", "hard-links", "free-space", "inodes", "reservation"}


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures with the fewest bytes, as on a slow network."""
    monkeypatch.setattr(speed, "TRIED_S_MAX", 0.0)


def examined(root: str, *, state_bytes: int | None = None) -> dict[str, Finding]:
    """The findings about the root itself, by check."""
    found = examine(Question(root=root, state_bytes=state_bytes))
    assert found.fit == all(finding.level != "fail" for finding in found.findings)
    assert {finding.topic for finding in found.findings} == {"root", "memory", "machine", "software"}
    return {finding.check: finding for finding in found.findings if finding.topic == "root"}


def failed(findings: dict[str, Finding]) -> set[str]:
    return {check for check, finding in findings.items() if finding.level == "fail"}


def keys(place: Place) -> str:
    """What lies in the bucket, as the server lists it: objects and unfinished uploads."""
    found = [
        send(place.server.endpoint, place.server.admin, "GET", f"/{place.bucket}", query=query)
        for query in ({"prefix": f"{place.prefix}/" if place.prefix else ""}, {"uploads": ""})
    ]
    return "".join(f"{part.partition('<')[0]}\n" for answer in found for part in answer.body.decode().split("<Key>")[1:])


def started(root: str) -> None:
    """A job of one rank that starts at `root` and saves."""
    from checkpointd_client import Checkpointer

    with Checkpointer(root) as ckpt:
        ckpt.save(1, {"w": torch.ones(8)}).wait()


# --- a bucket that is well -------------------------------------------------------------------------------------------


def test_a_bucket_that_is_well_is_left_as_it_was(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_at(s3_place, monkeypatch)
    findings = examined(root, state_bytes=1 << 30)
    assert failed(findings) == set()
    assert set(findings) == TRIED
    assert not NOT_OF_BUCKETS & set(findings)
    assert {check: one.seen for check, one in findings.items() if one.level != "ok"}.keys() <= {"encryption", "throughput"}
    assert "MiB/s" in findings["throughput"].seen
    assert "1.0 GiB take about" in findings["throughput"].seen
    assert keys(s3_place) == ""


def test_what_a_killed_doctor_left_goes_with_the_next_one(seaweed_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """BUCKETSCRATCH-2: a doctor that is killed, another that is asked to end, and one that may end."""
    root = root_at(seaweed_place, monkeypatch)
    for number, left in ((signal.SIGKILL, True), (signal.SIGTERM, False), (signal.SIGINT, False)):
        command = [sys.executable, "-c", STOPPED, root]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT | os.environ, text=True) as doctor:
            assert doctor.stdout is not None
            assert doctor.stdout.readline() == "uploading\n"
            doctor.send_signal(number)
            assert doctor.wait(60) != 0
        assert (keys(seaweed_place) != "") == left, number
        if left:
            examined(root)
            assert keys(seaweed_place) == ""


ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(sys.path)}
STOPPED = """
import asyncio, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs in the background
from checkpointd.doctor.bucket import uploads
from checkpointd.doctor.bucket import examine as bucket
from checkpointd.doctor.examine import Question, examine

async def stays(place):
    store = uploads.ObjectStore(place)
    writer = await store.open_writer("stays")
    await writer.write_at(0, bytes(uploads.PART_BYTES_MIN))
    print("uploading", flush=True)
    await asyncio.Event().wait()

bucket.TRIALS = (*bucket.TRIALS[:1], ("stays", stays))
examine(Question(root=sys.argv[1]))
"""


# --- servers that ignore something -----------------------------------------------------------------------------------

IF_NONE_MATCH, IF_MATCH = "if-none-match", "if-match"


@pytest.mark.parametrize(
    ("lost", "check", "words"),
    [(IF_NONE_MATCH, "create-once", "If-None-Match"), (IF_MATCH, "replace-seen", "If-Match")],
)
def test_a_server_that_ignores_a_condition(
    moto_place: Place, monkeypatch: pytest.MonkeyPatch, lost: str, check: str, words: str
) -> None:
    with CarelessProxy(moto_place.server.endpoint, loses={lost}) as proxy:
        root = root_at(moto_place, monkeypatch, endpoint=proxy.endpoint)
        findings = examined(root)
        assert failed(findings) == {check}
        assert "two decisions on one save could both win" in findings[check].fix
        for _ in range(2):
            with pytest.raises(ConditionsIgnoredError, match=words) as refusal:
                started(root)
            assert "checkpointd doctor" in str(refusal.value)
        assert any(header.startswith(f"{lost}:") for header in proxy.lost)
    assert keys(moto_place) == ""
    started(root_at(moto_place, monkeypatch))  # past the proxy


# --- what the root's URL and credentials get wrong -------------------------------------------------------------------


def test_wrong_credentials(seaweed_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_at(seaweed_place, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "guessed")
    findings = examined(root)
    assert failed(findings) == {"rights"}
    assert "may not list, put, get, head, delete" in findings["rights"].seen
    assert "SignatureDoesNotMatch" in findings["rights"].seen
    assert "the secret key is wrong" in findings["rights"].fix
    with pytest.raises(StoreError, match="the secret key is wrong"):
        started(root)


def test_a_bucket_that_is_not_there(s3_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    root = root_at(replace(s3_place, bucket="no-such-bucket"), monkeypatch)
    findings = examined(root)
    assert set(findings) == {"bucket", "root"}
    assert "there is no such bucket" in findings["root"].fix
    with pytest.raises(StoreError, match="there is no such bucket"):
        started(root)


def test_an_endpoint_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = quote(f"http://127.0.0.1:{silent.getsockname()[1]}")
        root = f"s3://ckpts/run1?endpoint={endpoint}&retry_s=1&request_s=1"
        findings = examined(root)
        assert set(findings) == {"bucket", "root"}
        assert "the network or the endpoint may be wrong" in findings["root"].fix
        with pytest.raises(StoreError, match="the network or the endpoint may be wrong"):
            started(root)
