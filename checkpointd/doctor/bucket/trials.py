"""Tests the promises of a bucket by using it: conditions, metadata, ranges, listings, names and the clock.

A check returns its Finding. It raises StoreErrors that it does not expect, and the caller turns them into findings.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from checkpointd.doctor.finding import Finding
from checkpointd.store.objects.bucket import Bucket, Version
from checkpointd.store.objects.conditions import NEVER

RACERS: Final = 8
BODY_BYTES: Final = 300_000
SKEW_S: Final = 5.0
"""A difference that is harmless."""
SKEW_S_MAX: Final = 900.0
"""S3 refuses signatures that are older, or from a later time."""
STAMP_S: Final = 1.0
"""Servers round the times of objects down to seconds."""

_NO_CONDITIONS: Final = (
    "two decisions on one save could both win: update the server, take the proxy away that drops If-None-Match and If-Match, "
    "or use another server"
)

_finding = partial(Finding, "root")


async def create_once(bucket: Bucket) -> Finding:
    """If-None-Match: votes, outcomes and starts have one winner."""
    key = "created"
    first = await bucket.create(key, b"first", _mark())
    if not first and not await _holds(bucket, key, b"first"):
        return _finding("create-once", "fail", "an object that was not there could not be created", _NO_CONDITIONS)
    if await bucket.create(key, b"second", _mark()) or not await _holds(bucket, key, b"first"):
        return _finding("create-once", "fail", "a second creation of the same object was not refused", _NO_CONDITIONS)
    bodies = [b"racer %d" % number for number in range(RACERS)]
    marks = [_mark() for _ in bodies]
    told = await asyncio.gather(*(bucket.create("raced", body, mark) for body, mark in zip(bodies, marks, strict=True)))
    head = await bucket.look("raced")
    # A request that was repeated may be told that it lost; its mark shows that it won.
    winners = [number for number, won in enumerate(told) if won or (head is not None and head.mark == marks[number])]
    if len(winners) != 1 or not await _holds(bucket, "raced", bodies[winners[0]]):
        seen = f"of {RACERS} creations of one object at once, {len(winners)} were told that they won"
        return _finding("create-once", "fail", seen, _NO_CONDITIONS)
    return _finding("create-once", "ok", f"a second creation was refused, and one of {RACERS} at once won")


async def replace_seen(bucket: Bucket) -> Finding:
    """If-Match: `latest` is replaced only by who has seen what is there."""
    key, fail = "replaced", partial(_finding, "replace-seen", "fail")
    await bucket.put(key, b"first")
    version = await _version(bucket, key)
    if await bucket.replace(key, b"wrong", NEVER, _mark()) or not await _holds(bucket, key, b"first"):
        return fail("a replacement of a version that never was has been carried out", _NO_CONDITIONS)
    if not await bucket.replace(key, b"second", version, _mark()) and not await _holds(bucket, key, b"second"):
        return fail("a replacement of the version that the server had shown was refused", _NO_CONDITIONS)
    if await bucket.replace(key, b"third", version, _mark()) or not await _holds(bucket, key, b"second"):
        return fail("a replacement of an old version was carried out", _NO_CONDITIONS)
    if await bucket.replace("missing", b"new", version, _mark()) or await bucket.look("missing") is not None:
        return fail("a replacement of an object that is not there has made it", _NO_CONDITIONS)
    return _finding("replace-seen", "ok", "only the version that was seen could be replaced")


async def marks(bucket: Bucket) -> Finding:
    """Metadata: whoever gets no answer to a creation sees by its mark whether it has won."""
    mark = _mark()
    await bucket.create("marked", b"", mark)
    head = await bucket.look("marked")
    if head is None or head.mark != mark:
        advice = "a creation whose answer is lost would count as lost: let the proxy pass the headers x-amz-meta-* on"
        return _finding("marks", "fail", "metadata does not come back with its object", advice)
    return _finding("marks", "ok", "metadata comes back with its object")


async def ranges(bucket: Bucket) -> Finding:
    """Ranges: loads read parts of objects."""
    body = os.urandom(BODY_BYTES)
    await bucket.put("ranges", body)
    places = {
        "the beginning": (0, 1000),
        "the middle": (BODY_BYTES // 3, 70_000),
        "the end": (BODY_BYTES - 10, 10),
        "beyond the end": (BODY_BYTES - 10, 1000),
        "behind the end": (BODY_BYTES + 10, 1000),
    }
    wrong = []
    for name, (offset, nbytes) in places.items():
        if bytes(await bucket.get_range("ranges", offset, nbytes)) != body[offset : offset + nbytes]:
            wrong.append(name)
    if wrong:
        advice = "loads would find damage: look for a proxy that changes the header Range"
        return _finding("ranges", "fail", f"wrong bytes came back from {', '.join(wrong)} of an object", advice)
    return _finding("ranges", "ok", f"the right bytes came back from {', '.join(places)} of an object")


async def listing(bucket: Bucket) -> Finding:
    """Listings show at once what was written and removed: starts find attempts by them."""
    sizes = {f"object-{number}": number for number in range(3)}
    advice = "a job finds earlier starts and attempts by listings: use a server whose listings are never late"
    for name, size in sizes.items():
        await bucket.put(f"listing/{name}", bytes(size))
    if {entry.name: entry.size for entry in await bucket.list("listing")} != sizes:
        return _finding("listing", "fail", "a listing does not show what was just written", advice)
    if "listing" not in [entry.name for entry in await bucket.list("") if entry.is_prefix]:
        return _finding("listing", "fail", "a listing does not show the prefix of what was just written", advice)
    await bucket.delete([f"listing/{name}" for name in sizes])
    if await bucket.list("listing") or await bucket.look("listing/object-0") is not None:
        return _finding("listing", "fail", "a listing shows what was just removed", advice)
    return _finding("listing", "ok", "listings show at once what was written and removed")


async def names(bucket: Bucket) -> Finding:
    """Whether names come back as they were given: other cases, alphabets and signs."""
    omega, given = "\N{GREEK SMALL LETTER OMEGA}", [f"names/{name}" for name in ("name", "NAME")]
    given += [f"names/{name}" for name in (f"{omega} {omega}", "with spaces", "100%", "a+b", "q?x#y&z=1", "n" * 200)]
    for key in given:
        await bucket.put(key, key.encode())
    changed = [key for key in given if not await _holds(bucket, key, key.encode())]
    listed = [f"names/{entry.name}" for entry in await bucket.list("names")]
    if changed or sorted(listed) != sorted(given):
        lost = changed or sorted({*listed} ^ {*given})
        return _finding("names", "warn", f"names come back changed: {lost[0]!r}", "use tags of lower-case letters and digits")
    return _finding("names", "ok", "names come back as they were given")


async def clock(bucket: Bucket, now: Callable[[], float] = time.time) -> Finding:
    """Whether this machine's clock agrees with the server's. Signatures carry the time; no decision of checkpointd uses it."""
    before = now()
    await bucket.put("clock", b"")
    head = await bucket.look("clock")
    return skew(head.written if head is not None else 0.0, before, now(), bucket.url)


def skew(written: float, before: float, after: float, url: str) -> Finding:
    """The finding about an object that was written between `before` and `after` by this machine's clock."""
    off = max(before - STAMP_S - written, written - after, 0.0)
    if off < SKEW_S:
        return _finding("clock", "ok", "this machine's clock agrees with the server's")
    seen = f"this machine's clock and the server's are {off:.0f} s apart"
    if off > SKEW_S_MAX and url.startswith("s3:"):
        return _finding("clock", "fail", seen, "S3 refuses signatures that are 15 minutes off: set both by NTP or chrony")
    advice = "S3 refuses signatures that are 15 minutes off, and shown times mislead: let chrony or NTP set both"
    return _finding("clock", "warn" if off > 60 else "note", seen, advice)


async def _version(bucket: Bucket, key: str) -> Version:
    head = await bucket.look(key)
    return NEVER if head is None else head.version


async def _holds(bucket: Bucket, key: str, data: bytes) -> bool:
    found = await bucket.get(key, len(data))
    return not isinstance(found, int) and found[0] == data


def _mark() -> str:
    return secrets.token_hex(8)
