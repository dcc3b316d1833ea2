"""A store that passes every call on to another store: the base class of stores that change only some calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from checkpointd.errors import CheckpointdError
from checkpointd.store.base import SMALL_BYTES_MAX, Capabilities, Entry, ObjectWriter, Store
from checkpointd.store.conditions import check_conditions_of
from checkpointd.store.identity import Identity, forget_synced, identity_of
from checkpointd.store.posix.plain import PlainFiles
from checkpointd.store.requests import Requests, requests_of
from checkpointd.store.showing import plain_files_of
from checkpointd.store.uploads import UnfinishedUpload, abort_upload_of, unfinished_uploads_of

T = TypeVar("T")


class PassingStore(Store):
    """`store`, call for call. Closing it closes `store`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def capabilities(self) -> Capabilities:
        return self._store.capabilities

    @property
    def plain_files(self) -> PlainFiles | None:
        return plain_files_of(self._store)

    @property
    def requests(self) -> Requests | None:
        return requests_of(self._store)

    @property
    def uncached(self) -> Store:
        return self._store.uncached

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await self._store.put_if_absent(key, data, durable=durable)

    async def put(self, key: str, data: bytes) -> None:
        await self._store.put(key, data)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        return await self._store.put_if_match(key, expected, data)

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        return await self._store.open_writer(key, size_hint=size_hint, size_max=size_max)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        return await self._store.open_replacement(key, size_hint=size_hint)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        return await self._store.get(key, size_max=size_max)

    async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
        return await self._store.get_each(keys, size_max=size_max)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        await self._store.get_range(key, offset, out)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        return await self._store.get_parts(key, offset, parts, then)

    async def list(self, prefix: str) -> list[Entry]:
        return await self._store.list(prefix)

    async def stat(self, key: str) -> int | None:
        return await self._store.stat(key)

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self._store.delete(key, durable=durable)

    async def delete_each(self, keys: Sequence[str]) -> None:
        await self._store.delete_each(keys)

    async def identity(self, key: str) -> Identity | None:
        return await identity_of(self._store, key)

    def forget_synced(self) -> None:
        forget_synced(self._store)

    async def unfinished_uploads(self) -> Sequence[UnfinishedUpload]:
        return await unfinished_uploads_of(self._store)

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        await abort_upload_of(self._store, upload)

    async def check_conditions(self, *, new: bool) -> None:
        await check_conditions_of(self._store, new=new)

    async def settle(self, key: str) -> None:
        await self._store.settle(key)

    async def sweep(self) -> int:
        return await self._store.sweep()

    async def close(self) -> None:
        await self._store.close()
