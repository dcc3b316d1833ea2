"""A bucket in memory whose answers a test can replace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from typing_extensions import Buffer

from checkpointd.errors import NotFoundError
from checkpointd.store.base import Entry
from checkpointd.store.objects.bucket import Bucket, ObjectHead, Version
from checkpointd.store.requests import Requests
from checkpointd.store.uploads import UnfinishedUpload


@dataclass(frozen=True)
class Stored:
    data: bytes
    version: int
    mark: str = ""

    @property
    def head(self) -> ObjectHead:
        return ObjectHead(len(self.data), Version(str(self.version), None), self.mark)


class FakeBucket(Bucket):
    """Objects in a dict. `answer`: called with the request's name and key after it has had its effect; may raise, or return
    another answer than the one given to it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.left: list[UnfinishedUpload] = []
        self.asked: list[tuple[str, str]] = []
        self.parts: list[memoryview] = []
        self.part_s = 0.0
        self.answer: Callable[[str, str, object], object] = lambda _, __, answer: answer
        self._versions = 0
        self._requests = Requests()

    @property
    def url(self) -> str:
        return "s3://fake/run"

    @property
    def requests(self) -> Requests:
        return self._requests

    def store(self, key: str, data: Buffer, mark: str = "") -> None:
        self._versions += 1
        self.objects[key] = Stored(bytes(data), self._versions, mark)

    async def _answered(self, name: str, key: str, answer: object) -> object:
        self.asked.append((name, key))
        await asyncio.sleep(0)
        return self.answer(name, key, answer)

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        won = key not in self.objects
        if won:
            self.store(key, data, mark)
        return bool(await self._answered("create", key, won))

    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        found = self.objects.get(key)
        won = found is not None and str(found.version) == version.e_tag
        if won:
            self.store(key, data, mark)
        return bool(await self._answered("replace", key, won))

    async def put(self, key: str, data: Buffer) -> None:
        self.store(key, data)
        await self._answered("put", key, None)

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        body = bytearray()
        async for part in parts:
            await asyncio.sleep(self.part_s)
            await self._answered("part", key, None)
            body += part
            self.parts.append(memoryview(part))
            self.parts[-1] = memoryview(b"")
            del part
        self.store(key, body)
        await self._answered("complete", key, None)

    async def get(self, key: str, size_max: int) -> tuple[bytes, ObjectHead] | int:
        found = self._found(key)
        await self._answered("get", key, None)
        return (found.data, found.head) if len(found.data) <= size_max else len(found.data)

    async def get_range(self, key: str, offset: int, nbytes: int) -> Buffer:
        found = self._found(key)
        await self._answered("range", key, None)
        return found.data[offset : offset + nbytes]

    async def look(self, key: str) -> ObjectHead | None:
        await self._answered("look", key, None)
        found = self.objects.get(key)
        return None if found is None else found.head

    async def list(self, prefix: str) -> list[Entry]:
        found: dict[str, Entry] = {}
        for key, stored in self.objects.items():
            if key.startswith(f"{prefix}/" if prefix else ""):
                name, deeper, _ = key[len(prefix) + 1 if prefix else 0 :].partition("/")
                found[name] = Entry(name, 0 if deeper else len(stored.data), bool(deeper))
        await self._answered("list", prefix, None)
        return [found[name] for name in sorted(found)]

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.objects.pop(key, None)
            await self._answered("delete", key, None)

    async def unfinished(self) -> Sequence[UnfinishedUpload]:
        return list(self.left)

    async def abort(self, upload: UnfinishedUpload) -> None:
        self.left.remove(upload)

    async def close(self) -> None:
        self.asked.append(("close", ""))

    def _found(self, key: str) -> Stored:
        if key not in self.objects:
            raise NotFoundError(f"there is no object {key!r} in {self.url}")
        return self.objects[key]
