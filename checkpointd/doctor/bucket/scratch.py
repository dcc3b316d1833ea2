"""A prefix below the root in which the checks write, removed afterwards.

Invariants
  BUCKETSCRATCH-1  The checks never touch objects that were there before: they write only below a new prefix in `.checkpointd`.
  BUCKETSCRATCH-2  The doctor removes everything below that prefix at the end, unfinished uploads included, also after an error,
      Ctrl-C, SIGTERM and SIGHUP. After SIGKILL, the next doctor on this machine removes it, once the killed process is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Final

from checkpointd.bucket_urls import BucketUrl
from checkpointd.doctor.scratch import PLACE
from checkpointd.errors import CheckpointdError
from checkpointd.store import writers
from checkpointd.store.objects.remote import RemoteBucket

log = logging.getLogger("checkpointd")

CLEAR_S: Final = 60.0


@contextlib.asynccontextmanager
async def scratch(url: BucketUrl) -> AsyncIterator[RemoteBucket]:
    """The part of the bucket below a new prefix at the root `url`. Makes no request before the caller does."""
    place, own = url.below(PLACE), writers.new_writer()
    bucket = RemoteBucket(place.below(own))
    try:
        yield bucket
    finally:
        try:
            async with asyncio.timeout(CLEAR_S):
                if bucket.requests.puts:
                    await _clear(RemoteBucket(place), own)
        except (CheckpointdError, TimeoutError) as error:
            log.warning("what the doctor has left below %s cannot be removed: %s", place.place, str(error) or "no answer")


async def _clear(bucket: RemoteBucket, own: str) -> None:
    """Remove what this doctor has written, and what killed doctors of this machine have."""
    with contextlib.suppress(CheckpointdError):  # without the right to list uploads, nobody can abort them
        for upload in await bucket.unfinished():
            if _is_left(upload.key.partition("/")[0], own):
                await bucket.abort(upload)
    for entry in await bucket.list(""):
        if entry.is_prefix and _is_left(entry.name, own):
            await _remove(bucket, entry.name)


def _is_left(name: str, own: str) -> bool:
    return name == own or writers.has_ended(name)


async def _remove(bucket: RemoteBucket, prefix: str) -> None:
    entries = await bucket.list(prefix)
    objects = [f"{prefix}/{entry.name}" for entry in entries if not entry.is_prefix]
    if objects:
        await bucket.delete(objects)
    for entry in entries:
        if entry.is_prefix:
            await _remove(bucket, f"{prefix}/{entry.name}")
