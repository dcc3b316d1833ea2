"""Logs of roots for tests: records, logs of a given length in any store, and stores that count."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

from checkpointd.errors import CheckpointdError
from checkpointd.layout.log_records import (
    LOG,
    AbortRecord,
    AnnounceRecord,
    BeginRecord,
    CommitRecord,
    LogState,
    Record,
)
from checkpointd.layout.manifest import BallotRef, ErrorReport, WriterIdentity
from checkpointd.pipeline.root.log import RootLog, new_nonce
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, Store
from checkpointd.store.identity import Identity
from checkpointd.store.memory import MemoryStore
from checkpointd.store.objects.store import ObjectStore
from checkpointd.store.passing import PassingStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from checkpointd.testing.simbucket import SimBucket, SimClient

T = TypeVar("T")

WRITER = WriterIdentity(host="node", pid=7, time="2026-01-02T03:04:05Z")
STORES = ("memory", "posix", "bucket")


# --- records ----------------------------------------------------------------------------------------------------------


def name(number: int, start: int = 1) -> str:
    """The attempt of a save."""
    return f"step-{number}/{start:08d}-{number}"


def begin(start: int = 1, *spared: str, nonce: str = "") -> BeginRecord:
    return BeginRecord(start=start, nonce=nonce or new_nonce(), world_size=2, spared=spared, writer=WRITER)


def announce(number: int, start: int = 1) -> AnnounceRecord:
    return AnnounceRecord(attempt=name(number, start), n=number, step=number)


def commit(number: int, start: int = 1) -> CommitRecord:
    ballot = BallotRef(digest="0" * 32, size=10)
    return CommitRecord(
        attempt=name(number, start), n=number, step=number, world_size=2, ballot=ballot, decided_by=0, writer=WRITER
    )


def abort(number: int, start: int = 1) -> AbortRecord:
    error = ErrorReport(code="StoreError", message="the disk is full")
    return AbortRecord(attempt=name(number, start), error=error, decided_by=1, writer=WRITER)


def entry_of(at: int, first: int = 0) -> list[Record]:
    """The records of entry `at` of the logs here: a begin, and then in turn an announcement and its decision, for saves after
    `first`.
    """
    if at == 1:
        return [begin()]
    number = first + at // 2
    if at % 2 == 0:
        return [announce(number)]
    return [abort(number) if number % 3 == 0 else commit(number)]


async def made(store: Store, entries: int, first: int = 0) -> list[LogState]:
    """Make a log of so many entries, with `first` as in `entry_of`. Returns the state after each, from the empty one on."""
    log = RootLog(store)
    found = [log.state]
    for at in range(1, entries + 1):
        await add_entry(log, at, first)
        await log.compact()
        found.append(log.state)
    return found


async def add_entry(log: RootLog, at: int, first: int = 0) -> None:
    """Append entry `at` of `entry_of`, unless it is there."""
    await log.append(lambda state: entry_of(at, first) if state.number < at else [])


def committed(state: LogState) -> set[str]:
    return {one.prefix for one in state.attempts.values() if one.status == "checkpoint"}


async def names_in(store: Store, ending: str = "") -> list[str]:
    return [one.name for one in await store.list(LOG) if one.name.endswith(ending)]


async def objects_of(store: Store) -> dict[str, bytes]:
    """All objects of the log."""
    return {key: await store.get(key) for key in [f"{LOG}/{one}" for one in await names_in(store)]}


# --- stores -----------------------------------------------------------------------------------------------------------


def run_on(kind: str, path: Path, main: Callable[[Store], Coroutine[object, object, T]]) -> T:
    """Run `main` with an empty store of this kind."""

    async def on_disk() -> T:
        async with PosixStore(path / "root") as store:
            return await main(store)

    async def in_bucket() -> T:
        async with ObjectStore(SimClient(SimBucket(page=50))) as store:
            return await main(store)

    if kind == "posix":
        return asyncio.run(on_disk())
    return simloop.run(1, in_bucket() if kind == "bucket" else main(MemoryStore()))


class Counting(PassingStore):
    """Counts the calls of each kind, and the objects that the calls for many name."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls: Counter[str] = Counter()
        self.keys: list[str] = []

    def taken(self) -> dict[str, int]:
        """The calls since the last call of this."""
        found, self.calls, self.keys = dict(self.calls), Counter(), []
        return found

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self._count("put", key)
        return await super().put_if_absent(key, data, durable=durable)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        self._count("get", key)
        return await super().get(key, size_max=size_max)

    async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
        self._count("get", *keys)
        return await super().get_each(keys, size_max=size_max)

    async def list(self, prefix: str) -> list[Entry]:
        self._count("list", prefix)
        return await super().list(prefix)

    async def delete_each(self, keys: Sequence[str]) -> None:
        self._count("delete", *keys)
        await super().delete_each(keys)

    async def identity(self, key: str) -> Identity | None:
        found = await super().identity(key)
        if found is not None:
            self._count("identity", key)
        return found

    async def settle(self, key: str) -> None:
        self._count("settle", key)
        await super().settle(key)

    def _count(self, kind: str, *keys: str) -> None:
        self.calls[kind] += len(keys)
        self.keys += keys
