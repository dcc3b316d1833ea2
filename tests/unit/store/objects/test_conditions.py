"""What a start finds out about a server: CONDITION-1, CONDITION-2 and CONDITION-3."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from checkpointd.errors import ConditionsIgnoredError, StoreError
from checkpointd.store.objects.bucket import ObjectHead, Version
from checkpointd.store.objects.conditions import check_conditions
from tests.unit.store.objects.fake_bucket import FakeBucket

PRODUCT = [Path(__file__).resolve().parents[4] / folder for folder in ("checkpointd", "client")]


class Overwriting(FakeBucket):
    """A server that ignores one of the conditions: `create` or `replace`."""

    def __init__(self, ignored: str) -> None:
        super().__init__()
        self.ignored = ignored

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        if self.ignored == "create":
            self.store(key, data, mark)
            return bool(await self._answered("create", key, True))
        return await super().create(key, data, mark)

    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        if self.ignored == "replace":
            self.store(key, data, mark)
            return bool(await self._answered("replace", key, True))
        return await super().replace(key, data, version, mark)


class Refusing(FakeBucket):
    """A server that takes no version for the one that it has shown, as if it compared it with and without quotes."""

    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        return bool(await self._answered("replace", key, False))


class Unmarked(FakeBucket):
    """A server that forgets metadata."""

    async def look(self, key: str) -> ObjectHead | None:
        found = await super().look(key)
        return None if found is None else ObjectHead(found.size, found.version)


def test_a_new_root_needs_five_requests_and_a_later_start_one() -> None:
    bucket = FakeBucket()
    asyncio.run(check_conditions(bucket, new=True))
    assert sorted(name for name, _ in bucket.asked) == ["create", "create", "look", "replace", "replace"]
    [(key, stored)] = bucket.objects.items()
    assert key.startswith(".checkpointd/conditions/")
    assert b'"honoured"' in stored.data
    bucket.asked.clear()
    asyncio.run(check_conditions(bucket, new=False))
    assert bucket.asked == [("get", key)]


def test_a_root_without_a_record_is_tried_although_it_is_not_new() -> None:
    bucket = FakeBucket()
    asyncio.run(check_conditions(bucket, new=False))
    assert ("look", next(iter(bucket.objects))) in bucket.asked
    assert len(bucket.objects) == 1


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (Overwriting("create"), "If-None-Match"),
        (Overwriting("replace"), "If-Match"),
        (Refusing(), "the version that the server shows"),
        (Unmarked(), "metadata"),
    ],
)
def test_a_server_that_does_not_keep_the_promise_is_refused_at_every_start(bucket: FakeBucket, words: str) -> None:
    for new in (True, False, False):
        with pytest.raises(ConditionsIgnoredError, match=words) as refusal:
            asyncio.run(check_conditions(bucket, new=new))
        assert "s3://fake/run" in str(refusal.value)
        assert "checkpointd doctor" in str(refusal.value)
        assert not refusal.value.retryable
        assert bucket.objects == {}


@pytest.mark.parametrize("ignored", ["create", "replace"])
@pytest.mark.parametrize("killed_after", [1, 2, 3, 4])
def test_a_trial_that_was_killed_on_a_bad_server_is_not_believed(ignored: str, killed_after: int) -> None:
    """CONDITION-2, for a kill after each request."""
    bucket = Overwriting(ignored)
    left = killed_after

    def kill(_name: str, _key: str, answer: object) -> object:
        nonlocal left
        left -= 1
        if left <= 0:
            raise StoreError("killed")
        return answer

    bucket.answer = kill
    with pytest.raises(StoreError):
        asyncio.run(check_conditions(bucket, new=True))
    bucket.answer = lambda _name, _key, answer: answer
    with pytest.raises(ConditionsIgnoredError):
        asyncio.run(check_conditions(bucket, new=False))


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4, 5])
def test_after_a_trial_that_was_killed_on_a_good_server_the_next_one_passes(killed_after: int) -> None:
    bucket = FakeBucket()
    left = killed_after

    def kill(_name: str, _key: str, answer: object) -> object:
        nonlocal left
        left -= 1
        if left <= 0:
            raise StoreError("killed")
        return answer

    bucket.answer = kill
    with pytest.raises(StoreError):
        asyncio.run(check_conditions(bucket, new=True))
    bucket.answer = lambda _name, _key, answer: answer
    asyncio.run(check_conditions(bucket, new=False))
    [stored] = bucket.objects.values()
    assert b'"honoured"' in stored.data


def test_starts_that_try_at_once_all_pass() -> None:
    """CONDITION-3."""
    bucket = FakeBucket()

    async def starts() -> None:
        await asyncio.gather(*(check_conditions(bucket, new=True) for _ in range(8)))

    asyncio.run(starts())
    [stored] = bucket.objects.values()
    assert b'"honoured"' in stored.data


def test_the_record_is_that_of_one_server_and_one_place() -> None:
    class At(FakeBucket):
        def __init__(self, url: str) -> None:
            super().__init__()
            self.at = url

        @property
        def url(self) -> str:
            return self.at

    keys = set()
    for url in (
        "s3://a/run",
        "s3://a/run2",
        "s3://a/run?endpoint=http%3A%2F%2Fx%3A1",
        "s3://a/run?endpoint=http%3A%2F%2Fy%3A1",
    ):
        bucket = At(url)
        asyncio.run(check_conditions(bucket, new=True))
        keys |= set(bucket.objects)
    assert len(keys) == 4
    same = At("s3://a/run?retry_s=5")
    asyncio.run(check_conditions(same, new=True))
    assert set(same.objects) <= keys


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", bytes(10_000)])
def test_a_record_that_cannot_be_understood_is_not_believed(data: bytes) -> None:
    bucket = FakeBucket()
    asyncio.run(check_conditions(bucket, new=True))
    [key] = bucket.objects
    bucket.store(key, data)
    bucket.asked.clear()
    asyncio.run(check_conditions(bucket, new=False))
    assert len(bucket.asked) == 6
    assert b'"honoured"' in bucket.objects[key].data


def test_whoever_begins_a_start_tries_conditions_first() -> None:
    """Jobs, recoveries, rollbacks and mirrors call `starting.begin`, each in its own way."""
    texts = {path: path.read_text() for folder in PRODUCT for path in folder.rglob("*.py") if "testing" not in path.parts}
    begin = {path.name for path, text in texts.items() if "starting.begin(" in text or "starting import begin" in text}
    assert begin == {"startup.py", "recovery.py", "rollback.py", "hold.py"}
    assert {path.name for path, text in texts.items() if "await check_conditions_of(store" in text} == begin
