"""Stores that each break the contract in one way, and a class of the contract suite for each of them and for one that is whole.

tests/contract/test_suite.py runs this file, and expects every class but `TestMemoryStore` to fail.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from typing_extensions import Buffer

from checkpointd.errors import CheckpointdError
from checkpointd.store.base import SMALL_BYTES_MAX, Entry, ObjectWriter, Store
from checkpointd.store.memory import MemoryStore
from checkpointd.testing.contract import StoreContract


class LastCreateWins(MemoryStore):
    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        await self.put(key, data)
        return True


class LooksThenCreates(MemoryStore):
    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        absent = await self.stat(key) is None
        await asyncio.sleep(0)
        if absent:
            await self.put(key, data)
        return absent


class CreatesInTwoSteps(MemoryStore):
    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        if not await super().put_if_absent(key, data[: len(data) // 2]):
            return False
        await asyncio.sleep(0)
        await self.put(key, data)
        return True


class ReplacesInTwoSteps(MemoryStore):
    async def put(self, key: str, data: bytes) -> None:
        await super().put(key, data[: len(data) // 2])
        await asyncio.sleep(0)
        await super().put(key, data)


class ComparesThenReplaces(MemoryStore):
    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        same = (await self.get(key) if await self.stat(key) is not None else None) == expected
        await asyncio.sleep(0)
        if same:
            await self.put(key, data)
        return same


class ComparesTheBeginning(MemoryStore):
    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        found = await self.get(key) if await self.stat(key) is not None else None
        if expected is not None and found is not None and found.startswith(expected):
            expected = found
        return await super().put_if_match(key, expected, data)


class AbsentIsEmpty(MemoryStore):
    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return await super().put_if_match(key, expected or None, data)


class WrappedWriter:
    """A writer of which one call is replaced."""

    def __init__(self, inner: ObjectWriter) -> None:
        self._inner, self._end = inner, 0

    async def write_at(self, offset: int, data: Buffer) -> None:
        await self._inner.write_at(offset, data)

    async def finish(self, size: int) -> None:
        await self._inner.finish(size)

    async def discard(self) -> None:
        await self._inner.discard()


class Appending(WrappedWriter):
    async def write_at(self, offset: int, data: Buffer) -> None:
        await super().write_at(self._end, data)
        self._end += memoryview(data).nbytes


class NotCutting(WrappedWriter):
    async def write_at(self, offset: int, data: Buffer) -> None:
        await super().write_at(offset, data)
        self._end = max(self._end, offset + memoryview(data).nbytes)

    async def finish(self, size: int) -> None:
        await super().finish(max(size, self._end))


class WholeBlocks(WrappedWriter):
    async def write_at(self, offset: int, data: Buffer) -> None:
        await super().write_at(offset // 4096 * 4096, data)


class KeepingDiscarded(WrappedWriter):
    async def discard(self) -> None:
        await self._inner.finish(0)


def writing(wrapper: type[WrappedWriter]) -> type[MemoryStore]:
    class Wrapping(MemoryStore):
        async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
            return wrapper(await super().open_writer(key, size_hint=size_hint, size_max=size_max))

    Wrapping.__name__ = wrapper.__name__
    return Wrapping


class WritesOver(MemoryStore):
    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        await self.delete(key)
        self.abandon(key)
        return await super().open_writer(key, size_hint=size_hint, size_max=size_max)


class ReplacesTooEarly(MemoryStore):
    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        await self.delete(key)
        return await super().open_replacement(key, size_hint=size_hint)


class SettlesNothing(MemoryStore):
    async def settle(self, key: str) -> None:
        pass


class DeletesBelow(MemoryStore):
    async def delete(self, key: str, *, durable: bool = True) -> None:
        await super().delete(key, durable=durable)
        for entry in await self.list(key):
            await self.delete(f"{key}/{entry.name}")


class SweepsObjects(MemoryStore):
    async def sweep(self) -> int:
        await self.delete(".checkpointd/starts/00000001")
        return 0


class ReadsAnySize(MemoryStore):
    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        return await super().get(key)


class ReadsShort(MemoryStore):
    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        size = await self.stat(key)
        if size is not None and offset + out.nbytes > size:
            out = out[: max(0, size - offset)]
        await super().get_range(key, offset, out)


class MissingIsEmpty(MemoryStore):
    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        return await super().get(key, size_max=size_max) if await self.stat(key) is not None else b""


class ListsUnsorted(MemoryStore):
    async def list(self, prefix: str) -> list[Entry]:
        return (await super().list(prefix))[::-1]


class ListsNothing(MemoryStore):
    async def list(self, prefix: str) -> list[Entry]:
        return []


class TakesBadKeys(MemoryStore):
    async def put(self, key: str, data: bytes) -> None:
        try:
            await super().put(key, data)
        except CheckpointdError:
            return


class NeverCloses(MemoryStore):
    async def close(self) -> None:
        pass


BROKEN: tuple[type[MemoryStore], ...] = (
    LastCreateWins,
    LooksThenCreates,
    CreatesInTwoSteps,
    ReplacesInTwoSteps,
    ComparesThenReplaces,
    ComparesTheBeginning,
    AbsentIsEmpty,
    writing(Appending),
    writing(NotCutting),
    writing(WholeBlocks),
    writing(KeepingDiscarded),
    WritesOver,
    ReplacesTooEarly,
    SettlesNothing,
    DeletesBelow,
    SweepsObjects,
    ReadsAnySize,
    ReadsShort,
    MissingIsEmpty,
    ListsUnsorted,
    ListsNothing,
    TakesBadKeys,
    NeverCloses,
)


def suite(kind: type[MemoryStore]) -> type[StoreContract]:
    class Suite(StoreContract):
        @pytest.fixture
        async def store(self) -> AsyncIterator[Store]:
            async with kind() as store:
                yield store

    return Suite


KINDS: tuple[type[MemoryStore], ...] = (MemoryStore, *BROKEN)
globals().update({f"Test{kind.__name__}": suite(kind) for kind in KINDS})
