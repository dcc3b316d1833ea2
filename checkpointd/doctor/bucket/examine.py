"""Runs all checks of a root in a bucket, one after another. A check that fails does not stop the others.

If the doctor may not write and remove there, only the checks that read are left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from checkpointd.bucket_urls import PROVIDERS, BucketUrl
from checkpointd.doctor.bucket import rights, settings, speed, trials, uploads
from checkpointd.doctor.bucket.scratch import scratch
from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.doctor.scratch import signals_unwind
from checkpointd.errors import CheckpointdError
from checkpointd.store.objects.remote import RemoteBucket
from checkpointd.store.objects.settings import read_settings
from checkpointd.waits import to_the_end

Trial: TypeAlias = Callable[[RemoteBucket], Awaitable[Finding]]

TRIALS: Final[tuple[tuple[str, Trial], ...]] = (
    ("create-once", trials.create_once),
    ("replace-seen", trials.replace_seen),
    ("marks", trials.marks),
    ("ranges", trials.ranges),
    ("listing", trials.listing),
    ("names", trials.names),
    ("clock", trials.clock),
    ("multipart", uploads.multipart),
    ("unfinished-uploads", uploads.unfinished_uploads),
    ("latency", speed.latency),
)
_LOOPBACK: Final = ("localhost", "127.", "[::1]")


def here(root: BucketUrl, state: StateSize | None) -> list[Finding]:
    """The findings at `root`."""
    with signals_unwind():
        return asyncio.run(_findings(root, state))


async def _findings(url: BucketUrl, state: StateSize | None) -> list[Finding]:
    found = [bucket(url)]
    async with scratch(url) as place:
        for check, first in (("root", rights.reached), ("rights", rights.rights)):
            found.append(await _made(check, partial(first, place)))
            if found[-1].level != "ok":
                break
        else:
            found += [one async for one in _tried(place, state)]
    if found[1].level == "fail":
        return found
    found += await _settings(url)
    return found


async def _tried(place: RemoteBucket, state: StateSize | None) -> AsyncIterator[Finding]:
    for check, trial in TRIALS:
        yield await _made(check, partial(trial, place))
    yield await _made("throughput", partial(speed.throughput, place, state))


async def _made(check: str, trial: Callable[[], Awaitable[Finding]]) -> Finding:
    """The finding of `trial`. An error that `trial` did not expect becomes a finding, too."""
    try:
        return await trial()
    except CheckpointdError as error:
        return rights.failed(check, error)


async def _settings(url: BucketUrl) -> list[Finding]:
    if url.scheme != "s3":
        return [settings.of_other_provider(url.scheme)]
    found = await to_the_end(asyncio.get_running_loop().run_in_executor(None, read_settings, url))
    return settings.judged(found, url)


def bucket(url: BucketUrl) -> Finding:
    """Where the bucket is, and whether the way there is encrypted."""
    endpoint = url.options.get("endpoint", "")
    seen = f"{PROVIDERS[url.scheme]}, bucket {url.bucket}" + (f" at {endpoint}" if endpoint else "")
    seen += f", below {url.prefix}/" if url.prefix else ", the whole bucket"
    if endpoint.startswith("http://") and not urlsplit(endpoint).netloc.startswith(_LOOPBACK):
        advice = "states cross the network as they are: give an https:// endpoint unless that network is your own"
        return Finding("root", "bucket", "note", f"{seen}, without TLS", advice)
    return Finding("root", "bucket", "ok", seen)
