"""Measures a bucket from this machine: the latency of small requests, and the throughput of large ones."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable
from functools import partial
from statistics import median
from typing import Final

from checkpointd.doctor.finding import Finding, StateSize
from checkpointd.phrases import byte_size
from checkpointd.store.objects.bucket import Bucket
from checkpointd.store.objects.multipart import PART_BYTES_MIN
from checkpointd.store.objects.store import AT_ONCE, ObjectStore

SMALL_BYTES: Final = 1024
ROUNDS: Final = 10
SLOW_S: Final = 0.5
LARGE_BYTES: Final = 64 << 20
TRIED_BYTES: Final = 2 * PART_BYTES_MIN
"""If these take long, no more are sent."""
TRIED_S_MAX: Final = 8.0
SAVE_S_LONG: Final = 600.0
"""A save takes at most this long by default (`commit_timeout_s`)."""

_finding = partial(Finding, "root")


async def latency(bucket: Bucket) -> Finding:
    """The median time of a small put, and of a small get."""
    puts, gets = [], []
    for number in range(ROUNDS):
        puts.append(await _timed(bucket.put(f"small/{number}", bytes(SMALL_BYTES))))
        gets.append(await _timed(bucket.get(f"small/{number}", SMALL_BYTES)))
    put, get = median(puts), median(gets)
    seen = f"a small put takes {put * 1e3:.1f} ms, a small get {get * 1e3:.1f} ms"
    if max(put, get) > SLOW_S:
        advice = "a commit takes about ten of them, one after another: use a bucket in this machine's region"
        return _finding("latency", "note", seen, advice)
    return _finding("latency", "ok", seen)


async def throughput(bucket: Bucket, state: StateSize | None) -> Finding:
    """The speed of one upload of several parts and of its download, each with as many requests at once as in a save or load."""
    store = ObjectStore(bucket)
    block = memoryview(os.urandom(PART_BYTES_MIN))
    nbytes, upload_s = TRIED_BYTES, await _uploaded(store, block, TRIED_BYTES)
    if upload_s < TRIED_S_MAX:
        nbytes, upload_s = LARGE_BYTES, await _uploaded(store, block, LARGE_BYTES)
    whole = memoryview(bytearray(PART_BYTES_MIN * AT_ONCE))[:nbytes]
    download_s = await _timed(store.get_range(f"large-{nbytes}", 0, whole))
    for offset in range(0, nbytes, PART_BYTES_MIN):
        if whole[offset : offset + PART_BYTES_MIN] != block:
            return _finding("throughput", "fail", f"{byte_size(nbytes)} read back differently", "look for a proxy on the way")
    return judged(nbytes / upload_s, nbytes / download_s, nbytes, state)


def judged(upload_bps: float, download_bps: float, nbytes: int, state: StateSize | None) -> Finding:
    """The finding for a measured speed: how long a save of `state` takes at that speed, on this node."""
    seen = f"upload {_rate(upload_bps)}, download {_rate(download_bps)} ({byte_size(nbytes)}, one object)"
    if state is None:
        return _finding("throughput", "ok", seen)
    save_s = state.node_bytes / upload_bps
    seen += f"; this node's {byte_size(state.node_bytes)} take about {max(1, round(save_s))} s"
    if save_s > SAVE_S_LONG:
        advice = "longer than `commit_timeout_s`, unless several objects at once are faster: raise it, or save less often"
        return _finding("throughput", "note", seen, advice)
    return _finding("throughput", "ok", seen)


async def _uploaded(store: ObjectStore, block: memoryview, nbytes: int) -> float:
    """How many seconds an upload of `nbytes` takes, all of whose parts are `block`."""
    writer = await store.open_writer(f"large-{nbytes}")
    began = time.perf_counter()
    try:
        await asyncio.gather(*(writer.write_at(offset, block) for offset in range(0, nbytes, block.nbytes)))
        await writer.finish(nbytes)
    finally:
        await writer.discard()
    return time.perf_counter() - began


async def _timed(request: Awaitable[object]) -> float:
    began = time.perf_counter()
    await request
    return time.perf_counter() - began


def _rate(bps: float) -> str:
    return f"{bps / (1 << 20):.1f} MiB/s"
