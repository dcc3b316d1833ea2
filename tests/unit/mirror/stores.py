"""Stores that watch, fail or change bytes, for the tests of mirrors; and what their tests do to origins."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from checkpointd.commit.retention import Retention
from checkpointd.errors import CheckpointdError, StoreError, StoreFullError, UnreadableError
from checkpointd.layout.keys import LATEST, LOG, SERVICE
from checkpointd.layout.log_records import CommitRecord, decode_entry
from checkpointd.mirror.mirroring import MirrorConfig, Mirroring, run_once
from checkpointd.mirror.news import News
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.passing import PassingStore

COMMIT = "commit"


def flip(store: MemoryStore, key: str, at: int | None = None) -> None:
    data = bytearray(store._objects[key])
    data[len(data) // 3 if at is None else at] ^= 1
    store._objects[key] = memoryview(bytes(data))


def commits_in(key: str, data: bytes) -> list[str]:
    """The attempts whose commits an object has that is put; none if it is no entry of a log."""
    name = key.removeprefix(f"{LOG}/").removesuffix(".json")
    if not name.isdecimal():
        return []
    return [record.attempt for record in decode_entry(data, int(name)).records if isinstance(record, CommitRecord)]


async def origin_of(origin: MemoryStore, count: int) -> MemoryStore:
    """`origin` as it was when it had its first `count` checkpoints."""
    then = MemoryStore("origin")
    then._objects = {key: data for key, data in origin._objects.items() if not key.startswith((f"{LOG}/0", LATEST))}
    for entry in sorted(key for key in origin._objects if key.startswith(f"{LOG}/0")):
        then._objects[entry] = origin._objects[entry]
        count -= len(commits_in(entry, origin._objects[entry].tobytes()))
        if not count:
            break
    return then


async def attempt(origin: Store, mirror: Store, rules: Retention) -> bool:
    """One run that may fail. Returns whether it did."""
    news: list[News] = []
    try:
        await run_once(Mirroring(origin, mirror, MirrorConfig(rules=rules), tell=news.append), news)
    except (CheckpointdError, Interrupted):
        return True
    return False


class Interrupted(Exception):
    """The process was stopped here."""


class Watched(PassingStore):
    """Notes what is put, what is removed of attempts, and which large objects are opened or replaced. A commit in the log is
    noted as if it were an object of its attempt.
    """

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.inner = store or MemoryStore("mirror")
        super().__init__(self.inner)
        self.puts: list[str] = []
        self.opened: list[str] = []
        self.replaced: list[str] = []
        self.deleted: list[str] = []

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self.puts += [key, *(f"{attempt}/{COMMIT}" for attempt in commits_in(key, data))]
        return await super().put_if_absent(key, data, durable=durable)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self.puts.append(key)
        return await super().put_if_match(key, expected, data)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self.puts.append(key)
        self.opened.append(key)
        return await super().open_writer(key, size_hint=size_hint, size_max=size_max)

    async def delete(self, key: str, *, durable: bool = True) -> None:
        if not key.startswith(SERVICE):
            self.deleted.append(key)
        await super().delete(key, durable=durable)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        self.puts.append(key)
        self.replaced.append(key)
        return await super().open_replacement(key, size_hint=size_hint)


class Breaking(PassingStore):
    """Is interrupted at call number `calls` that changes something, before it or after it, and fails from then on."""

    def __init__(self, store: Store, calls: int, *, after: bool) -> None:
        super().__init__(store)
        self._left, self._after = calls, after

    async def _count(self, call: Callable[[], Awaitable[Any]]) -> Any:
        self._left -= 1
        if self._left < 0 or (self._left == 0 and not self._after):
            raise Interrupted
        result = await call()
        if self._left == 0:
            raise Interrupted
        return result

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await self._count(partial(super().put_if_absent, key, data, durable=durable))  # type: ignore[no-any-return]

    async def put(self, key: str, data: bytes) -> None:
        await self._count(partial(super().put, key, data))

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return await self._count(partial(super().put_if_match, key, expected, data))  # type: ignore[no-any-return]

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self._count(partial(super().delete, key, durable=durable))

    async def delete_each(self, keys: Any) -> None:
        for key in keys:
            await self.delete(key)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        writer = await self._count(partial(super().open_writer, key, size_hint=size_hint))
        return BreakingWriter(self, writer)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        return BreakingWriter(self, await self._count(partial(super().open_replacement, key, size_hint=size_hint)))


class BreakingWriter:
    def __init__(self, store: Breaking, writer: ObjectWriter) -> None:
        self._store, self._writer = store, writer

    async def write_at(self, offset: int, data: Any) -> None:
        await self._store._count(partial(self._writer.write_at, offset, data))

    async def finish(self, size: int) -> None:
        await self._store._count(partial(self._writer.finish, size))

    async def discard(self) -> None:
        return  # nobody is there any more to do it


class Refusing(PassingStore):
    """Refuses to put one object; `<tag>/<attempt>/commit` stands for the entry of the log with that commit."""

    def __init__(self, store: Store, key: str) -> None:
        super().__init__(store)
        self._key = key

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if self._key in (key, *(f"{attempt}/{COMMIT}" for attempt in commits_in(key, data))):
            raise StoreError(f"{key} cannot be put")
        return await super().put_if_absent(key, data, durable=durable)


class Small(PassingStore):
    """Has room for a number of bytes."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.inner, self.room = store, 1 << 30

    @property
    def used(self) -> int:
        return sum(data.nbytes for data in self.inner._objects.values())

    def _take(self, nbytes: int) -> None:
        if self.used + nbytes > self.room:
            raise StoreFullError(f"{self.room - self.used} bytes are free")

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self._take(len(data))
        return await super().put_if_absent(key, data, durable=durable)

    async def put(self, key: str, data: bytes) -> None:
        self._take(len(data))
        await super().put(key, data)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._take(len(data))
        return await super().put_if_match(key, expected, data)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self._take(size_hint)
        return await super().open_writer(key, size_hint=size_hint, size_max=size_max)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        self._take(size_hint)
        return await super().open_replacement(key, size_hint=size_hint)


class Unreadable(PassingStore):
    """Cannot read objects whose keys have `part` in them."""

    def __init__(self, store: Store, part: str) -> None:
        super().__init__(store)
        self._part = part

    @property
    def uncached(self) -> Store:
        return self

    def _check(self, key: str) -> None:
        if self._part in key:
            raise UnreadableError(f"{key} cannot be read now")

    async def get(self, key: str, *, size_max: int = 1 << 26) -> bytes:
        self._check(key)
        return await super().get(key, size_max=size_max)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        self._check(key)
        await super().get_range(key, offset, out)

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        self._check(key)
        return await super().get_parts(key, offset, parts, then)


class Flipping(PassingStore):
    """The first read of each object has one wrong bit; reads past the cache have none."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self._seen: set[str] = set()

    @property
    def uncached(self) -> Store:
        return self._store

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        def wrong() -> Any:
            if key not in self._seen:
                self._seen.add(key)
                parts[0][100] ^= 1
            return then()

        return await super().get_parts(key, offset, parts, wrong)


class Damaging(PassingStore):
    """Large objects below `part` have a wrong bit once they were written."""

    def __init__(self, store: MemoryStore, part: str) -> None:
        super().__init__(store)
        self._part = part

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        writer = await super().open_writer(key, size_hint=size_hint, size_max=size_max)
        return DamagingWriter(writer) if self._part in key else writer

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        writer = await super().open_replacement(key, size_hint=size_hint)
        return DamagingWriter(writer) if self._part in key else writer


class DamagingWriter:
    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer

    async def write_at(self, offset: int, data: Any) -> None:
        changed = bytearray(data)
        changed[200] ^= 1
        await self._writer.write_at(offset, changed)

    async def finish(self, size: int) -> None:
        await self._writer.finish(size)

    async def discard(self) -> None:
        await self._writer.discard()


class Lagging(PassingStore):
    """Does not show what lies at `prefix` in the first `looks` listings of it."""

    def __init__(self, store: Store, prefix: str, looks: int) -> None:
        super().__init__(store)
        self._prefix, self.looks = prefix, looks

    async def list(self, prefix: str) -> Any:
        found = await super().list(prefix)
        if prefix.startswith(self._prefix) and self.looks > 0:
            self.looks -= 1
            return []
        return [entry for entry in found if entry.name != self._prefix or self.looks <= 0]


class Meanwhile(PassingStore):
    """Lets `work` happen at the store behind this one, at read number `calls`."""

    def __init__(self, store: Store, calls: int, work: Callable[[Store], Awaitable[object]]) -> None:
        super().__init__(store)
        self._left, self._work = calls, work
        self.happened = False

    async def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.happened = True
            await self._work(self._store)

    async def get(self, key: str, *, size_max: int = 1 << 26) -> bytes:
        await self._count()
        return await super().get(key, size_max=size_max)

    async def get_parts(self, key: str, offset: int, parts: Any, then: Any) -> Any:
        await self._count()
        return await super().get_parts(key, offset, parts, then)

    async def list(self, prefix: str) -> Any:
        await self._count()
        return await super().list(prefix)
