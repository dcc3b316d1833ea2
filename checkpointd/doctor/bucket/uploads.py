"""Tests multipart uploads: shards are written by them."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Final

from checkpointd.commands import install
from checkpointd.doctor.finding import Finding
from checkpointd.errors import StoreError
from checkpointd.store.objects.bucket import Bucket
from checkpointd.store.objects.multipart import PART_BYTES_MIN
from checkpointd.store.objects.store import ObjectStore

LAST_BYTES: Final = 1000
PARTS: Final = 3

_finding = partial(Finding, "root")


async def multipart(bucket: Bucket) -> Finding:
    """An object of three parts, which appears only at the end, and one that is given up."""
    store, fail = ObjectStore(bucket), partial(_finding, "multipart", "fail")
    whole = os.urandom(PART_BYTES_MIN)
    parts = [bytes([number]) * 16 + whole[16:] for number in range(PARTS - 1)] + [whole[:LAST_BYTES]]
    writer = await store.open_writer("parts")
    try:
        for number, part in enumerate(parts):
            await writer.write_at(number * PART_BYTES_MIN, part)
        if await bucket.look("parts") is not None:
            return fail("an unfinished upload is visible", "use a server whose uploads appear when they are complete")
        size = sum(map(len, parts))
        await writer.finish(size)
    finally:
        await writer.discard()
    head = await bucket.look("parts")
    if head is None or head.size != size:
        seen = "is not there" if head is None else f"has {head.size} bytes of {size}"
        return fail(f"an upload of {PARTS} parts {seen} after its end", "look at the server's log")
    for number, part in enumerate(parts):
        if bytes(await bucket.get_range("parts", number * PART_BYTES_MIN, len(part))) != part:
            return fail(f"part {number + 1} of an upload reads back differently", "use another server, or look for its proxy")
    if not await _given_up(store, bucket, whole):
        return fail("an upload that was given up has appeared", "use a server whose uploads appear when they are complete")
    return _finding("multipart", "ok", f"{PARTS} parts appeared as one object at the end; an upload that was given up did not")


async def _given_up(store: ObjectStore, bucket: Bucket, part: bytes) -> bool:
    """Whether nothing appears of an upload that is given up after a part."""
    writer = await store.open_writer("given-up")
    await writer.write_at(0, part)
    await writer.discard()
    return await bucket.look("given-up") is None


async def unfinished_uploads(bucket: Bucket) -> Finding:
    """Listing and aborting uploads: `gc` and starts remove what killed writers have left. Saves work without it."""
    check, advice = "unfinished-uploads", "add a lifecycle rule that aborts unfinished uploads after a few days"
    if not bucket.url.startswith("s3:"):
        return _finding(check, "note", "not looked for here: only S3 can list them", f"on Google Cloud Storage, {advice}")
    store = ObjectStore(bucket)
    writer = await store.open_writer("unfinished")
    try:
        await writer.write_at(0, bytes(PART_BYTES_MIN))
        found = [upload for upload in await bucket.unfinished() if upload.key == "unfinished"]
        if not found:
            seen = "a listing does not show them, or botocore is not installed"
            return _finding(check, "note", seen, f"{install('s3')}; or {advice}")
        await bucket.abort(found[0])
        left = [upload for upload in await bucket.unfinished() if upload.key == "unfinished"]
    except StoreError as error:
        return _finding(check, "note", f"these credentials may not list or abort them: {_reason(error)}", advice)
    finally:
        with contextlib.suppress(StoreError):
            await writer.discard()
    if left:
        return _finding(check, "note", "one that was aborted is still listed", advice)
    return _finding(check, "ok", "these credentials may list and abort them, so `gc` removes what killed writers leave")


def _reason(error: StoreError) -> str:
    return str(error).partition(" failed: ")[2] or str(error)
