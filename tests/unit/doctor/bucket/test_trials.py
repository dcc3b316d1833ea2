"""Each trial of a bucket, on one that keeps its promise and on one that breaks it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from typing_extensions import Buffer

from checkpointd.doctor.bucket import trials
from checkpointd.doctor.finding import Finding
from checkpointd.store.base import Entry
from checkpointd.store.objects.bucket import Bucket, ObjectHead, Version
from tests.unit.store.objects.fake_bucket import FakeBucket, Stored

NOW = 1_800_000_000.0


class Well(FakeBucket):
    """A bucket whose objects were written just now."""

    written = NOW

    async def look(self, key: str) -> ObjectHead | None:
        found = await super().look(key)
        return None if found is None else ObjectHead(found.size, found.version, found.mark, self.written)


class CreatesTwice(Well):
    async def create(self, key: str, data: bytes, mark: str) -> bool:
        self.store(key, data, mark)
        return bool(await self._answered("create", key, True))


class TellsTwoThatTheyWon(Well):
    """The second of those who create at once is told that it has won, too."""

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        won = await super().create(key, data, mark)
        return won or data == b"racer 1"


class Creates(Well):
    """Refuses the second creation, and replaces all the same."""

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        won = await super().create(key, data, mark)
        self.store(key, data, mark)
        return won


class ReplacesAnything(Well):
    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        self.store(key, data, mark)
        return True


class ReplacesOldVersions(Well):
    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        if version.e_tag is not None and version.e_tag.isdecimal() and key in self.objects:
            self.store(key, data, mark)
            return True
        return False


class ReplacesNothing(Well):
    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        return False


class MakesWhatItReplaces(Well):
    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        if key not in self.objects:
            self.store(key, data, mark)
            return True
        return await super().replace(key, data, version, mark)


class Unmarked(Well):
    def store(self, key: str, data: Buffer, mark: str = "") -> None:
        super().store(key, data)


class WholeObjects(Well):
    async def get_range(self, key: str, offset: int, nbytes: int) -> Buffer:
        return self.objects[key].data


class LateListings(Well):
    async def list(self, prefix: str) -> list[Entry]:
        return (await super().list(prefix))[:-1]


class KeptListings(Well):
    async def delete(self, keys: Sequence[str]) -> None: ...


class LowerCase(Well):
    async def put(self, key: str, data: Buffer) -> None:
        await super().put(key.lower(), data)

    async def get(self, key: str, size_max: int) -> tuple[bytes, ObjectHead] | int:
        return await super().get(key.lower(), size_max)


def tried(check: str, bucket: Bucket) -> Finding:
    if check == "clock":
        return asyncio.run(trials.clock(bucket, lambda: NOW))
    trial = {"create-once": trials.create_once, "replace-seen": trials.replace_seen, "marks": trials.marks}
    trial |= {"ranges": trials.ranges, "listing": trials.listing, "names": trials.names}
    return asyncio.run(trial[check](bucket))


@pytest.mark.parametrize("check", ["create-once", "replace-seen", "marks", "ranges", "listing", "names", "clock"])
def test_a_bucket_that_keeps_its_promises(check: str) -> None:
    found = tried(check, Well())
    assert (found.check, found.level, found.fix) == (check, "ok", "")


@pytest.mark.parametrize(
    ("check", "bucket", "level", "words"),
    [
        ("create-once", CreatesTwice(), "fail", "a second creation"),
        ("create-once", Creates(), "fail", "a second creation"),
        ("create-once", TellsTwoThatTheyWon(), "fail", "2 were told that they won"),
        ("replace-seen", ReplacesAnything(), "fail", "never was"),
        ("replace-seen", ReplacesOldVersions(), "fail", "an old version"),
        ("replace-seen", ReplacesNothing(), "fail", "was refused"),
        ("replace-seen", MakesWhatItReplaces(), "fail", "has made it"),
        ("marks", Unmarked(), "fail", "metadata"),
        ("ranges", WholeObjects(), "fail", "the beginning, the middle"),
        ("listing", LateListings(), "fail", "just written"),
        ("listing", KeptListings(), "fail", "just removed"),
        ("names", LowerCase(), "warn", "names come back changed"),
    ],
)
def test_a_bucket_that_breaks_one(check: str, bucket: FakeBucket, level: str, words: str) -> None:
    found = tried(check, bucket)
    assert (found.check, found.level) == (check, level)
    assert words in found.seen
    assert found.fix


def test_a_creation_whose_answer_was_lost_counts_by_its_mark() -> None:
    """The winner of the race was repeated, and was told that it had lost (BUCKET-3)."""
    bucket = Well()
    bucket.answer = lambda name, key, answer: False if (name, key) == ("create", "raced") else answer
    assert tried("create-once", bucket).level == "ok"
    assert bucket.objects["raced"] == Stored(b"racer 0", bucket.objects["raced"].version, bucket.objects["raced"].mark)


@pytest.mark.parametrize(
    ("off", "url", "level"),
    [
        (0.0, "s3://a", "ok"),
        (-1.0, "s3://a", "ok"),
        (4.0, "s3://a", "ok"),
        (-7.0, "s3://a", "note"),
        (30.0, "s3://a", "note"),
        (-90.0, "s3://a", "warn"),
        (899.0, "s3://a", "warn"),
        (901.0, "s3://a", "fail"),
        (-5000.0, "s3://a", "fail"),
        (5000.0, "gs://a", "warn"),
    ],
)
def test_clocks_that_differ(off: float, url: str, level: str) -> None:
    found = trials.skew(NOW + off, NOW, NOW, url)
    assert found.level == level
    assert bool(found.fix) == (level != "ok")
