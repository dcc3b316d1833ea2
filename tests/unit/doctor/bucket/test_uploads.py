"""The trial of multipart uploads, on buckets that break a promise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from typing_extensions import Buffer

from checkpointd.doctor.bucket import uploads
from checkpointd.errors import UnreadableError
from checkpointd.store.uploads import UnfinishedUpload
from tests.unit.store.objects.fake_bucket import FakeBucket


class Visible(FakeBucket):
    """Shows an upload from its first part on."""

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        body = b""
        async for part in parts:
            body += bytes(part)
            self.store(key, body)
            del part


async def taken(parts: AsyncIterator[Buffer]) -> list[bytes]:
    """The parts; nothing here goes on referring to their memory."""
    found = []
    async for part in parts:
        found.append(bytes(part))
        del part
    return found


class Short(FakeBucket):
    """Loses the last part."""

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        body = await taken(parts)
        self.store(key, b"".join(body[:-1]))


class Mixed(FakeBucket):
    """Takes the parts in another order."""

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        body = await taken(parts)
        self.store(key, b"".join([*reversed(body[:-1]), body[-1]]))


def test_an_upload_appears_whole_and_at_the_end() -> None:
    assert asyncio.run(uploads.multipart(FakeBucket())).level == "ok"


@pytest.mark.parametrize(
    ("bucket", "words"),
    [(Visible(), "an unfinished upload is visible"), (Short(), "bytes of"), (Mixed(), "part 1 of an upload reads back")],
)
def test_an_upload_that_does_not(bucket: FakeBucket, words: str) -> None:
    found = asyncio.run(uploads.multipart(bucket))
    assert found.level == "fail"
    assert words in found.seen


def test_uploads_that_may_not_be_listed_are_a_note() -> None:
    class Hidden(FakeBucket):
        async def unfinished(self) -> Sequence[UnfinishedUpload]:
            raise UnreadableError("listing the unfinished uploads of s3://fake/run failed: AccessDenied")

    for bucket, words in ((Hidden(), "may not list or abort them: AccessDenied"), (FakeBucket(), "does not show them")):
        found = asyncio.run(uploads.unfinished_uploads(bucket))
        assert (found.level, words in found.seen) == ("note", True)
        assert "lifecycle rule" in found.fix
        assert bucket.objects == {}
