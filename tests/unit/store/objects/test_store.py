"""The store in a bucket: who won a conditional request (OBJECT-2), long reads, a store that only reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from checkpointd.errors import DamagedError, NotFoundError, StoreError, UnreadableError
from checkpointd.store.objects.store import RANGE_BYTES, ObjectStore
from checkpointd.store.uploads import UnfinishedUpload
from tests.unit.store.objects.fake_bucket import FakeBucket

pytestmark = pytest.mark.asyncio


def lost_after(request: str) -> Callable[[str, str, object], object]:
    """The request has its effect, and the answer is that of a repetition, which lost against it."""
    return lambda name, _, answer: False if name == request else answer


async def test_object_2_a_win_whose_reply_was_lost_is_a_win() -> None:
    bucket = FakeBucket()
    store = ObjectStore(bucket)
    bucket.answer = lost_after("create")
    assert await store.put_if_absent("t/a/outcome", b"commit") is True
    assert await store.put_if_absent("t/a/outcome", b"commit") is False
    assert await store.put_if_absent("t/a/outcome", b"abort") is False
    assert bucket.objects["t/a/outcome"].data == b"commit"


async def test_object_2_a_replacement_whose_reply_was_lost_is_one() -> None:
    bucket = FakeBucket()
    store = ObjectStore(bucket)
    await store.put("latest", b"1")
    bucket.answer = lost_after("replace")
    assert await store.put_if_match("latest", b"1", b"2") is True
    assert await store.put_if_match("latest", b"1", b"3") is False
    assert await store.get("latest") == b"2"


async def test_object_2_the_same_bytes_of_somebody_else_are_no_win() -> None:
    bucket = FakeBucket()
    one, other = ObjectStore(bucket), ObjectStore(bucket)
    assert await one.put_if_absent("t/a/outcome", b"abort") is True
    assert await other.put_if_absent("t/a/outcome", b"abort") is False


async def test_object_2_somebody_who_replaced_it_since_took_the_win() -> None:
    bucket = FakeBucket()
    store = ObjectStore(bucket)

    def overtaken(name: str, key: str, answer: object) -> object:
        if name == "create":
            bucket.store(key, b"other", "other mark")
            return False
        return answer

    bucket.answer = overtaken
    assert await store.put_if_absent("latest", b"mine") is False


async def test_object_3_a_loss_that_cannot_be_asked_for_is_an_error() -> None:
    bucket = FakeBucket()

    def unreadable(name: str, key: str, answer: object) -> object:
        if name == "look":
            raise UnreadableError(f"{key} cannot be read")
        return False if name == "create" else answer

    bucket.answer = unreadable
    with pytest.raises(UnreadableError, match="outcome"):
        await ObjectStore(bucket).put_if_absent("t/a/outcome", b"commit")


async def test_a_first_try_that_wins_asks_nothing_more() -> None:
    bucket = FakeBucket()
    await ObjectStore(bucket).put_if_absent("t/a/00000.vote", b"yes")
    assert bucket.asked == [("create", "t/a/00000.vote")]


async def test_a_replacement_reads_no_more_than_it_expects() -> None:
    bucket = FakeBucket()
    store = ObjectStore(bucket)
    bucket.store("latest", b"much longer than that")
    assert await store.put_if_match("latest", b"short", b"new") is False
    assert await store.put_if_match("missing", b"short", b"new") is False
    assert [name for name, _ in bucket.asked] == ["get"]


@pytest.mark.parametrize("nbytes", [1, RANGE_BYTES - 1, RANGE_BYTES, RANGE_BYTES + 1, 3 * RANGE_BYTES + 17])
async def test_a_long_read_is_several_requests(nbytes: int) -> None:
    bucket = FakeBucket()
    body = bytes(range(251)) * (nbytes // 251 + 2)
    bucket.store("object", body)
    out = bytearray(nbytes)
    await ObjectStore(bucket).get_range("object", 5, memoryview(out))
    assert out == body[5 : 5 + nbytes]
    assert len(bucket.asked) == -(-nbytes // RANGE_BYTES)


async def test_an_object_that_ends_within_a_long_read_is_damaged() -> None:
    bucket = FakeBucket()
    bucket.store("object", bytes(RANGE_BYTES + 10))
    with pytest.raises(DamagedError, match=f"ends before byte {RANGE_BYTES + 20}"):
        await ObjectStore(bucket).get_range("object", 0, memoryview(bytearray(RANGE_BYTES + 20)))


async def test_a_store_that_only_reads_refuses_every_write() -> None:
    bucket = FakeBucket()
    bucket.store("there", b"x")
    store = ObjectStore(bucket, read_only=True)
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: store.put("there", b"y"),
        lambda: store.put_if_absent("new", b"y"),
        lambda: store.put_if_match("there", b"x", b"y"),
        lambda: store.put_if_match("new", None, b"y"),
        lambda: store.open_writer("new"),
        lambda: store.delete("there"),
        lambda: store.delete_each(["there"]),
        lambda: store.abort_upload(UnfinishedUpload("new", "1")),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="opened to be read"):
            await call()
    assert await store.get("there") == b"x"
    assert {name for name, _ in bucket.asked} == {"get"}


async def test_settling_what_is_not_there_says_so() -> None:
    with pytest.raises(NotFoundError, match="missing"):
        await ObjectStore(FakeBucket()).settle("missing")


async def test_a_failed_look_leaves_the_name_free() -> None:
    bucket = FakeBucket()

    def fails(name: str, key: str, answer: object) -> object:
        raise UnreadableError("not now")

    bucket.answer = fails
    store = ObjectStore(bucket)
    with pytest.raises(UnreadableError):
        await store.open_writer("large")
    bucket.answer = lambda _, __, answer: answer
    writer = await store.open_writer("large")
    await writer.write_at(0, b"body")
    await writer.finish(4)
    assert bucket.objects["large"].data == b"body"


async def test_closing_ends_the_uploads_under_way() -> None:
    bucket = FakeBucket()
    store = ObjectStore(bucket)
    writer = await store.open_writer("large")
    await writer.write_at(0, bytes(20 << 20))
    await store.close()
    assert "large" not in bucket.objects
    with pytest.raises(StoreError):
        await writer.finish(20 << 20)
