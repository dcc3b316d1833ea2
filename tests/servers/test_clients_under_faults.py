"""What obstore and boto3 make of faults: which requests they repeat, and which errors they then raise.

A store that is built on them must know it: an error may hide a success, and `AlreadyExistsError` may be about one's own object.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from tests.servers.clients import s3_client, s3_store
from tests.servers.faults import (
    CONFLICT,
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    BlackHole,
    CutBefore,
    CutReply,
    Fault,
    LoseReply,
    Refuse,
    Twice,
)
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.fixtures import Place
from tests.servers.moto_server import MotoServer
from tests.servers.seaweed import SeaweedFS

obstore = pytest.importorskip("obstore", reason="needs obstore; `pip install obstore` brings it")
errors = pytest.importorskip("obstore.exceptions")

PART = 5 << 20
RETRIES = 2


class Client:
    """A store of obstore that goes through a proxy, and one that goes past it."""

    def __init__(self, place: Place, proxy: FaultyProxy, timeout_s: float = 60) -> None:
        self.place, self.proxy = place, proxy
        admin = place.server.admin
        self.store = s3_store(proxy.endpoint, admin, place.bucket, prefix=place.prefix, retries=RETRIES, timeout_s=timeout_s)
        self.past = s3_store(place.server.endpoint, admin, place.bucket, prefix=place.prefix)

    def create(self, body: bytes = b"text") -> Any:
        return self.store.put("key", body, mode="create")

    def stored(self) -> bytes | None:
        try:
            return bytes(self.past.get("key").bytes())
        except FileNotFoundError:
            return None

    def asked(self, operation: str = "PutObject") -> tuple[int, int]:
        """How many requests came to the proxy, and how many went on to the server."""
        return self.proxy.received[operation], self.proxy.forwarded[operation]


@pytest.fixture
def client(seaweed_place: Place, seaweed_proxy: FaultyProxy) -> Client:
    return Client(seaweed_place, seaweed_proxy)


def test_after_a_lost_reply_ones_own_object_already_exists(client: Client) -> None:
    client.proxy.add(LoseReply())
    with pytest.raises(errors.AlreadyExistsError):
        client.create(b"mine")
    assert client.asked() == (2, 2)
    assert client.stored() == b"mine"


def test_after_a_doubled_request_ones_own_object_already_exists(client: Client) -> None:
    client.proxy.add(Twice())
    with pytest.raises(errors.AlreadyExistsError):
        client.create(b"mine")
    assert client.asked() == (1, 2)
    assert client.stored() == b"mine"


def test_after_a_conflict_an_object_already_exists_that_does_not(client: Client) -> None:
    client.proxy.add(CONFLICT)
    with pytest.raises(errors.AlreadyExistsError):
        client.create()
    assert client.asked() == (1, 0)
    assert client.stored() is None


def test_after_a_lost_reply_ones_own_replacement_is_in_the_way(client: Client) -> None:
    seen = client.past.put("key", b"first")
    client.proxy.add(LoseReply())
    with pytest.raises(errors.PreconditionError):
        client.store.put("key", b"second", mode={"e_tag": seen["e_tag"]})
    assert client.asked() == (2, 2)
    assert client.stored() == b"second"


def test_a_timeout_says_nothing_about_a_put_and_is_not_repeated(seaweed_place: Place, seaweed_proxy: FaultyProxy) -> None:
    client = Client(seaweed_place, seaweed_proxy, timeout_s=3)
    client.proxy.add(LoseReply(silent=True))
    with pytest.raises(errors.GenericError, match="error sending request"):
        client.create()
    client.proxy.journal.wait_until(lambda: [one.server for one in client.proxy.journal.entries] == [["200"]])
    assert client.asked() == (1, 1)
    assert client.stored() == b"text"


def test_a_get_is_repeated_after_a_timeout(seaweed_place: Place, seaweed_proxy: FaultyProxy) -> None:
    client = Client(seaweed_place, seaweed_proxy, timeout_s=10)
    client.past.put("key", b"text")
    client.proxy.add(BlackHole())
    assert bytes(client.store.get("key").bytes()) == b"text"
    assert client.asked("GetObject") == (2, 1)


@pytest.mark.parametrize("fault", [CutBefore(), SLOW_DOWN, TOO_MANY_REQUESTS, INTERNAL_ERROR], ids=str)
def test_what_did_not_reach_the_server_is_repeated(client: Client, fault: Fault) -> None:
    client.proxy.add(fault, times=RETRIES)
    client.create()
    assert client.asked() == (RETRIES + 1, 1)
    assert client.stored() == b"text"


@pytest.mark.parametrize("fault", [SLOW_DOWN, TOO_MANY_REQUESTS, INTERNAL_ERROR], ids=str)
def test_a_server_that_goes_on_refusing_is_given_up(client: Client, fault: Refuse) -> None:
    client.proxy.add(fault, times=None)
    with pytest.raises(errors.GenericError, match=f"status code: {fault.status}(?s:.*){fault.code}"):
        client.create()
    assert client.asked() == (RETRIES + 1, 0)


def test_a_server_that_is_away_is_a_generic_error(client: Client) -> None:
    client.proxy.go_away()
    with pytest.raises(errors.GenericError, match="error sending request"):
        client.create()
    client.proxy.come_back()
    client.create()
    assert client.asked() == (1, 1)


def test_a_body_that_is_cut_is_read_from_there(client: Client) -> None:
    body = os.urandom(1 << 20)
    client.past.put("key", body)
    client.proxy.add(CutReply(300_000))
    assert bytes(client.store.get("key").bytes()) == body
    assert [one.request.headers.get("range") for one in client.proxy.journal.entries] == [None, f"bytes=300000-{len(body) - 1}"]


def test_a_listing_that_is_cut_is_not_repeated(client: Client) -> None:
    client.create()
    client.proxy.add(CutReply(50), operation="ListObjectsV2")
    with pytest.raises(errors.GenericError):
        client.store.list().collect()
    assert client.asked("ListObjectsV2") == (1, 1)


def test_parts_and_their_completion_are_repeated(client: Client) -> None:
    body = os.urandom(3 * PART)
    client.proxy.add(LoseReply(), operation="UploadPart", where=lambda request: request.query["partNumber"] == "2")
    client.proxy.add(LoseReply(), operation="CompleteMultipartUpload")
    client.store.put("key", body, use_multipart=True, chunk_size=PART)
    assert client.proxy.forwarded == {"CreateMultipartUpload": 1, "UploadPart": 4, "CompleteMultipartUpload": 2}
    assert client.stored() == body


def test_a_lost_beginning_leaves_an_upload_behind(client: Client) -> None:
    client.proxy.add(LoseReply(), operation="CreateMultipartUpload")
    client.store.put("key", bytes(PART), use_multipart=True, chunk_size=PART)
    assert client.asked("CreateMultipartUpload") == (2, 2)
    boto3 = s3_client(client.place.server.endpoint, client.place.server.admin)
    uploads = boto3.list_multipart_uploads(Bucket=client.place.bucket, Prefix=client.place.prefix)["Uploads"]
    assert [one["Key"] for one in uploads] == [f"{client.place.prefix}/key"]


def test_an_upload_that_fails_is_aborted(client: Client) -> None:
    client.proxy.add(SLOW_DOWN, operation="UploadPart", times=None)
    with pytest.raises(errors.GenericError):
        client.store.put("key", bytes(2 * PART), use_multipart=True, chunk_size=PART)
    assert client.asked("AbortMultipartUpload") == (1, 1)


def test_a_deletion_takes_a_list_even_of_one(client: Client) -> None:
    """And says nothing of what was not there."""
    client.create()
    client.store.delete("key")
    client.store.delete("key")
    assert client.proxy.received == {"PutObject": 1, "DeleteObjects": 2}


def test_who_may_only_read_gets_another_error_for_a_deletion(seaweed_place: Place) -> None:
    reader = s3_store(seaweed_place.server.endpoint, SeaweedFS.reader, seaweed_place.bucket, prefix=seaweed_place.prefix)
    with pytest.raises(errors.PermissionDeniedError):
        reader.put("key", b"text")
    with pytest.raises(errors.GenericError, match="AccessDenied"):
        reader.delete("key")


def test_replacing_nothing_is_one_error_of_both_servers(seaweed_place: Place, moto_place: Place) -> None:
    for place in (seaweed_place, moto_place):
        store = s3_store(place.server.endpoint, place.server.admin, place.bucket, prefix=place.prefix)
        with pytest.raises(errors.PreconditionError):
            store.put("key", b"text", mode={"e_tag": '"900150983cd24fb0d6963f7d28e17f72"'})


@pytest.mark.parametrize("proxied", ["seaweed", "moto"])
def test_boto3_waits_for_leave_to_send_a_body(
    request: pytest.FixtureRequest, seaweed: SeaweedFS, moto: MotoServer, proxied: str
) -> None:
    place: Place = request.getfixturevalue(f"{proxied}_place")
    proxy: FaultyProxy = request.getfixturevalue(f"{proxied}_proxy")
    body = os.urandom(3 << 20)
    key = {"Bucket": place.bucket, "Key": f"{place.prefix}/key"}
    boto3 = s3_client(proxy.endpoint, place.server.admin, retries=2)
    proxy.add(SLOW_DOWN, nth=2)
    proxy.add(LoseReply(), nth=3)
    for _ in range(3):
        boto3.put_object(Body=body, **key)
    assert all(one.request.waits_for_continue for one in proxy.journal.entries)
    assert [one.client for one in proxy.journal.entries] == ["200", "503", "cut", "200", "200"]
    assert boto3.get_object(**key)["Body"].read() == body
    assert proxy.received == Counter(PutObject=5, GetObject=1)
