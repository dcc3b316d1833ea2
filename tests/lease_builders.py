"""Leases in virtual time, for the tests of who waits for whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from checkpointd.layout.manifest import Lease, WriterIdentity, encode
from checkpointd.pipeline.root.leases import Sight
from checkpointd.store.memory import MemoryStore
from checkpointd.store.writers import Life
from checkpointd.testing import simloop

T = TypeVar("T")
LENGTH_S = 30.0
PREFIX = "global_step1/00000001-0"
SINCE = WriterIdentity(host="node7", pid=17, time="2026-01-01T00:00:00.000+00:00")


def simulated(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return simloop.run(1, work())


def now() -> float:
    return asyncio.get_running_loop().time()


def sight(process: str, life: Life = "unknown") -> Sight:
    return Sight(process=process, life=lambda _: life, length_s=LENGTH_S)


async def put_lease(store: MemoryStore, key: str, count: int = 1, length_s: float = LENGTH_S) -> None:
    await store.put(key, encode(Lease(process="elsewhere", count=count, length_s=length_s, writer=SINCE)))


async def renew_on(store: MemoryStore, key: str) -> None:
    for count in range(1, 1000):
        await put_lease(store, key, count)
        await asyncio.sleep(LENGTH_S / 3)
