"""Uploads in parts: what is copied and what is not, when a write returns, and what a failure leaves (MULTIPART-1 to 3)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import Buffer

from checkpointd.errors import StoreError
from checkpointd.store.objects import multipart
from checkpointd.store.objects.bucket import ObjectHead
from checkpointd.store.objects.multipart import PART_BYTES_MIN, PARTS_MAX, MultipartUpload, part_bytes_for
from checkpointd.store.objects.store import ObjectStore
from tests.unit.store.objects.fake_bucket import FakeBucket

pytestmark = pytest.mark.asyncio

PART = 1000


class Holding(FakeBucket):
    """Holds each part until the test lets it go, and notes whose memory it is."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[memoryview] = []
        self.more = asyncio.Event()
        self.go = asyncio.Event()

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        body = bytearray()
        async for part in parts:
            self.held.append(memoryview(part))
            del part
            self.more.set()
            await self.go.wait()
            body += self.held[-1]
            self.held.pop()
        self.store(key, body)

    async def holds(self, count: int) -> None:
        while len(self.held) < count:
            self.more.clear()
            await self.more.wait()


def upload(bucket: FakeBucket, part: int = PART) -> MultipartUpload:
    return MultipartUpload(bucket, "large", part, lambda: None)


async def test_multipart_1_a_whole_part_is_the_callers_memory() -> None:
    bucket, given_ = Holding(), np.arange(PART, dtype=np.uint8)
    writer = upload(bucket)
    writing = asyncio.ensure_future(writer.write_at(0, given_.data))
    await bucket.holds(1)
    assert np.shares_memory(np.frombuffer(bucket.held[0], np.uint8), given_)
    bucket.go.set()
    await writing
    await writer.finish(PART)
    assert bucket.objects["large"].data == given_.tobytes()


async def test_multipart_2_a_write_returns_when_nobody_needs_its_memory() -> None:
    bucket, given_ = Holding(), bytearray(b"a" * PART)
    writer = upload(bucket)
    writing = asyncio.ensure_future(writer.write_at(0, given_))
    await bucket.holds(1)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not writing.done()
    bucket.go.set()
    await writing
    given_[:] = b"b" * PART  # the caller may use it again
    await writer.finish(PART)
    assert bucket.objects["large"].data == b"a" * PART


async def test_multipart_2_a_copied_write_returns_at_once() -> None:
    bucket = Holding()
    writer = upload(bucket)
    await writer.write_at(0, bytearray(b"a" * 10))
    await writer.write_at(500, bytearray(b"c" * 500))
    assert not bucket.held
    bucket.go.set()
    await writer.write_at(10, bytearray(b"b" * 490))
    await writer.finish(PART)
    assert bucket.objects["large"].data == b"a" * 10 + b"b" * 490 + b"c" * 500


@given(st.integers(0, 5000), st.integers(1, 30), st.randoms(use_true_random=False))
async def test_what_is_written_in_any_order_arrives_in_one(size: int, cuts: int, rng: random.Random) -> None:
    body = rng.randbytes(size)
    places = [0, *sorted(rng.randrange(size + 1) for _ in range(cuts)), size]
    pieces = [(a, bytearray(body[a:b])) for a, b in pairwise(places) if a < b]
    rng.shuffle(pieces)
    bucket = FakeBucket()
    writer = upload(bucket)
    await asyncio.gather(*(writer.write_at(offset, piece) for offset, piece in pieces))
    await writer.finish(size)
    assert bucket.objects["large"].data == body
    assert len([name for name, _ in bucket.asked if name == "part"]) == (-(-size // PART) if size >= PART else 0)


async def test_a_small_object_is_one_request() -> None:
    bucket = FakeBucket()
    writer = upload(bucket)
    await writer.write_at(0, b"x" * (PART - 1))
    await writer.finish(PART - 1)
    assert [name for name, _ in bucket.asked] == ["put"]


async def test_multipart_2_bytes_far_ahead_wait_for_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "AHEAD_BYTES_MAX", 100)
    bucket = FakeBucket()
    writer = upload(bucket)
    await writer.write_at(10, b"b" * 90)
    far = [asyncio.ensure_future(writer.write_at(at, b"c" * 50)) for at in (100, 150)]
    for _ in range(20):
        await asyncio.sleep(0)
    assert not any(one.done() for one in far)
    await writer.write_at(0, b"a" * 10)
    await asyncio.gather(*far)
    await writer.finish(200)
    assert bucket.objects["large"].data == b"a" * 10 + b"b" * 90 + b"c" * 100


async def test_bytes_far_ahead_of_an_upload_that_ends_wait_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "AHEAD_BYTES_MAX", 100)
    writer = upload(FakeBucket())
    far = asyncio.ensure_future(writer.write_at(10, bytes(101)))
    await asyncio.sleep(0)
    await writer.discard()
    with pytest.raises(StoreError, match="finished or discarded"):
        await far


async def test_a_gap_is_an_error() -> None:
    bucket = FakeBucket()
    writer = upload(bucket)
    await writer.write_at(0, b"abc")
    await writer.write_at(5, b"xyz")
    with pytest.raises(StoreError, match="byte 3 was never written, and byte 5 was"):
        await writer.finish(8)
    await writer.discard()
    assert bucket.objects == {}


async def test_writing_a_byte_twice_is_an_error() -> None:
    writer = upload(FakeBucket())
    await writer.write_at(0, b"abc")
    with pytest.raises(StoreError, match="byte 1 was written before"):
        await writer.write_at(1, b"x")


async def test_what_the_server_has_is_not_cut_off() -> None:
    bucket = FakeBucket()
    writer = upload(bucket)
    await writer.write_at(0, bytes(PART + 10))
    with pytest.raises(StoreError, match="the server has more already"):
        await writer.finish(PART - 1)
    await writer.finish(PART)
    assert len(bucket.objects["large"].data) == PART


async def test_a_failed_upload_wakes_every_write() -> None:
    bucket = FakeBucket()

    def fails(name: str, key: str, answer: object) -> object:
        raise StoreError(f"{key}: slow down")

    bucket.answer = fails
    writer = upload(bucket)
    found = await asyncio.gather(*(writer.write_at(n * PART, bytearray(PART)) for n in range(5)), return_exceptions=True)
    assert [type(one) for one in found if one is not None] != []
    with pytest.raises(StoreError, match="slow down"):
        await writer.write_at(5 * PART, b"x")
    with pytest.raises(StoreError, match="slow down"):
        await writer.finish(5 * PART)
    await writer.discard()
    assert bucket.objects == {}


async def test_multipart_3_a_completion_whose_reply_was_lost_is_one() -> None:
    bucket = FakeBucket()

    def lost(name: str, key: str, answer: object) -> object:
        if name == "complete":
            raise StoreError("there is no such upload")
        return answer

    bucket.answer = lost
    writer = upload(bucket)
    await writer.write_at(0, bytes(2 * PART))
    await writer.finish(2 * PART)
    await writer.discard()
    assert len(bucket.objects["large"].data) == 2 * PART


async def test_multipart_3_a_completion_that_failed_is_an_error() -> None:
    bucket = FakeBucket()

    def failed(name: str, key: str, answer: object) -> object:
        if name == "complete":
            del bucket.objects[key]
            raise StoreError("the parts are gone")
        return answer

    bucket.answer = failed
    writer = upload(bucket)
    await writer.write_at(0, bytes(2 * PART))
    with pytest.raises(StoreError, match="the parts are gone"):
        await writer.finish(2 * PART)


@pytest.mark.parametrize("size", [10, 2 * PART], ids=["one put", "in parts"])
async def test_multipart_3_a_replacement_that_failed_is_an_error_although_an_object_is_there(size: int) -> None:
    bucket = FakeBucket()
    bucket.store("large", b"o" * size)
    old = bucket.objects["large"]

    def failed(name: str, key: str, answer: object) -> object:
        if name in ("put", "complete"):
            bucket.objects[key] = old  # the request had no effect
            raise StoreError("slow down")
        return answer

    bucket.answer = failed
    writer = MultipartUpload(bucket, "large", PART, lambda: None, old.head)
    await writer.write_at(0, b"n" * size)
    with pytest.raises(StoreError, match="slow down"):
        await writer.finish(size)
    await writer.discard()
    assert bucket.objects == {"large": old}


async def test_multipart_3_a_replacement_whose_reply_was_lost_is_one() -> None:
    bucket = FakeBucket()
    bucket.store("large", bytes(2 * PART))

    def lost(name: str, key: str, answer: object) -> object:
        if name == "complete":
            raise StoreError("there is no such upload")
        return answer

    bucket.answer = lost
    writer = MultipartUpload(bucket, "large", PART, lambda: None, bucket.objects["large"].head)
    await writer.write_at(0, b"n" * 2 * PART)
    await writer.finish(2 * PART)
    assert bucket.objects["large"].data == b"n" * 2 * PART


@pytest.mark.parametrize("size", [10, 2 * PART], ids=["one put", "in parts"])
async def test_multipart_3_a_replacement_that_failed_removes_nothing_although_nothing_was_there(size: int) -> None:
    bucket = FakeBucket()
    store = ObjectStore(bucket)
    writer = await store.open_replacement("large", size_hint=size)
    await writer.write_at(0, bytes(size))

    def failed(name: str, key: str, answer: object) -> object:
        if name in ("put", "complete"):
            bucket.store(key, b"of another process")
            raise StoreError("slow down")
        return answer

    bucket.answer = failed
    with pytest.raises(StoreError, match="slow down"):
        await writer.finish(size)
    await writer.discard()
    assert bucket.objects["large"].data == b"of another process"


async def test_a_failed_upload_does_not_wait_long_for_a_server_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was tried for `retry_s` by then. Asking for the object, and removing it, would each take as long again."""

    class Away(FakeBucket):
        async def look(self, key: str) -> ObjectHead | None:
            return await asyncio.Future()

        async def delete(self, keys: Sequence[str]) -> None:
            await asyncio.Future()

    def failed(name: str, key: str, answer: object) -> object:
        raise StoreError("the server was not reached")

    bucket = Away()
    bucket.answer = failed
    monkeypatch.setattr(multipart, "ASK_S", 0.01)
    writer = upload(bucket)
    await writer.write_at(0, bytes(10))
    async with asyncio.timeout(60):
        with pytest.raises(StoreError, match="not reached"):
            await writer.finish(10)
        await writer.discard()


async def test_discarding_waits_until_no_memory_is_read() -> None:
    bucket = Holding()
    writer = upload(bucket)
    writing = asyncio.ensure_future(writer.write_at(0, bytearray(3 * PART)))
    await bucket.holds(1)
    discarding = asyncio.ensure_future(writer.discard())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not discarding.done()
    bucket.go.set()
    await discarding
    assert bucket.held == []
    assert bucket.objects == {}
    with pytest.raises(StoreError):
        await writing


@pytest.mark.parametrize("size", [0, 1, PART_BYTES_MIN * PARTS_MAX, PART_BYTES_MIN * PARTS_MAX + 1, 5 * 10**12])
async def test_no_object_has_too_many_parts(size: int) -> None:
    part = part_bytes_for(size)
    assert part >= PART_BYTES_MIN
    assert part % (1 << 20) == 0
    assert size <= part * PARTS_MAX
