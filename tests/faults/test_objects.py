"""The store in a bucket while requests and replies are lost, repeated, late, slow and refused, on a real server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from checkpointd.errors import StoreError, UnreadableError
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.uploads import unfinished_uploads_of
from tests.servers.clients import s3_client
from tests.servers.faults import (
    CONFLICT,
    INTERNAL_ERROR,
    SLOW_DOWN,
    TOO_MANY_REQUESTS,
    ArriveLate,
    CutBefore,
    Delay,
    Fault,
    LoseReply,
    Refuse,
    Twice,
)
from tests.servers.faulty_proxy import FaultyProxy
from tests.servers.fixtures import Place, root_at

pytestmark = [pytest.mark.nightly, pytest.mark.asyncio]

MIB = 1 << 20
SIZE = 20 * MIB + 17
"""Two whole parts and the rest."""
BODY = random.Random(1).randbytes(SIZE)


@pytest.fixture
async def store(seaweed_place: Place, seaweed_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """A store behind the proxy. A request may take 4 s, and is repeated for 60 s."""
    url = root_at(seaweed_place, monkeypatch, endpoint=seaweed_proxy.endpoint, retry_s="60", request_s="4")
    async with open_store(url) as store:
        yield store


@pytest.fixture
async def impatient(seaweed_place: Place, seaweed_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    """The same place. A request is repeated for 1 s."""
    url = root_at(seaweed_place, monkeypatch, endpoint=seaweed_proxy.endpoint, retry_s="1", request_s="20")
    async with open_store(url) as store:
        yield store


REPEATED = [
    *(LoseReply(), LoseReply(silent=True), Twice(), ArriveLate(), ArriveLate(requests=1), CutBefore()),
    *(SLOW_DOWN, INTERNAL_ERROR, TOO_MANY_REQUESTS, Delay(before_s=0.1, after_s=0.1)),
]


@pytest.mark.parametrize("fault", REPEATED, ids=str)
async def test_store_1_whoever_creates_wins_once(store: Store, seaweed_proxy: FaultyProxy, fault: Fault) -> None:
    rule = seaweed_proxy.add(fault, header="if-none-match")
    assert await store.put_if_absent("t/a/outcome", b"commit") is True
    assert rule.hits == 1
    seaweed_proxy.deliver()
    assert await store.put_if_absent("t/a/outcome", b"abort") is False
    assert await store.get("t/a/outcome") == b"commit"


@pytest.mark.parametrize("call", ["create", "replace", "put"])
async def test_store_1_a_conflict_with_a_request_under_way_is_no_loss(
    store: Store, seaweed_proxy: FaultyProxy, call: str
) -> None:
    await store.put("latest", b"1")
    rule = seaweed_proxy.add(CONFLICT, operation="PutObject", times=2)
    if call == "create":
        assert await store.put_if_absent("outcome", b"commit") is True
    elif call == "replace":
        assert await store.put_if_match("latest", b"1", b"2") is True
    else:
        await store.put("latest", b"2")
    assert rule.hits == 2
    assert await store.get("outcome" if call == "create" else "latest") == (b"commit" if call == "create" else b"2")


READS: dict[str, Callable[[Store], Awaitable[object]]] = {
    "GetObject": lambda store: store.get("small"),
    "HeadObject": lambda store: store.stat("small"),
    "ListObjectsV2": lambda store: store.list(""),
}


@pytest.mark.parametrize("operation", READS)
async def test_store_6_a_read_that_is_refused_for_long_says_so(
    impatient: Store, seaweed_proxy: FaultyProxy, operation: str
) -> None:
    await impatient.put("small", b"object")
    seaweed_proxy.add(SLOW_DOWN, operation=operation, times=None)
    with pytest.raises(UnreadableError, match=r"503.*asked to slow down"):
        await READS[operation](impatient)


@pytest.mark.parametrize("call", ["create", "get", "list"])
async def test_store_6_a_bucket_in_another_region_is_said_at_once(store: Store, seaweed_proxy: FaultyProxy, call: str) -> None:
    """The client's error looks as if there was no answer; it is one, and a repetition gets the same."""
    seaweed_proxy.add(Refuse(301, "PermanentRedirect"), times=None)
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "create": lambda: store.put_if_absent("t/a/outcome", b"commit"),
        "get": lambda: store.get("t/a/outcome"),
        "list": lambda: store.list("t"),
    }
    with pytest.raises(StoreError, match=r"in another region.*\?region="):
        await calls[call]()
    assert seaweed_proxy.received.total() == 1


async def test_store_6_an_object_that_only_other_programs_could_name_is_said(
    moto_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = s3_client(moto_place.server.endpoint, moto_place.server.admin)
    client.put_object(Bucket=moto_place.bucket, Key="t//x", Body=b"")
    async with open_store(root_at(moto_place, monkeypatch)) as store:
        with pytest.raises(UnreadableError, match=r"another program.*remove it"):
            await store.list("t")


# --- large objects -------------------------------------------------------------------------------------------------------


async def written(store: Store, key: str = "t/a/00000-0.chunks") -> None:
    writer = await store.open_writer(key, size_hint=SIZE)
    try:
        view, block = memoryview(BODY), 8 * MIB
        await asyncio.gather(*(writer.write_at(at, view[at : at + block]) for at in range(0, SIZE, block)))
        await writer.finish(SIZE)
    except BaseException:
        await writer.discard()
        raise


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
async def test_store_3_an_upload_that_fails_leaves_nothing(
    impatient: Store, seaweed_proxy: FaultyProxy, operation: str
) -> None:
    rule = seaweed_proxy.add(SLOW_DOWN, operation=operation, times=None)
    with pytest.raises(StoreError, match=r"00000-0.chunks.*503"):
        await written(impatient)
    seaweed_proxy.remove(rule)
    assert await impatient.stat("t/a/00000-0.chunks") is None
    assert await unfinished_uploads_of(impatient) == []
