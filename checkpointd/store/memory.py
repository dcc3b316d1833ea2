"""The store in this process's memory. Nothing survives the process."""

from __future__ import annotations

from typing import Self

import numpy as np
from typing_extensions import Buffer

from checkpointd.errors import ClosedError, DamagedError, NotFoundError, StoreError
from checkpointd.store.base import SMALL_BYTES_MAX, Capabilities, Entry, ObjectWriter, Store
from checkpointd.store.names import check_key, check_prefix


class MemoryStore(Store):
    """Objects as bytes in a dict. Each call runs in one step of the loop, so no other call sees it half done."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._objects: dict[str, memoryview] = {}
        self._open_writers: set[str] = set()
        self._closed = False

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(alignment=1, shared=False)

    @property
    def uncached(self) -> Self:
        return self

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        return await self.put_if_match(key, None, data)

    async def put(self, key: str, data: bytes) -> None:
        self._check(key)
        self._objects[key] = memoryview(bytes(data))

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        self._check(key)
        if self._objects.get(key) != expected:
            return False
        self._objects[key] = memoryview(bytes(data))
        return True

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        self._check(key)
        if key in self._objects or key in self._open_writers:
            raise StoreError(f"creating {key!r} in {self.url} failed: that name is taken: a large object is written once")
        self._open_writers.add(key)
        return MemoryWriter(self, key, size_hint)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        self._check(key)
        return MemoryWriter(self, key, size_hint)

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        found = self._get(key)
        if found.nbytes > size_max:
            raise DamagedError(f"{key!r} in {self.url} is larger than the {size_max} bytes allowed", key=key)
        return found.tobytes()

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        part = self._get(key)[offset : offset + out.nbytes]
        if part.nbytes < out.nbytes:
            end = offset + out.nbytes
            raise DamagedError(
                f"{key!r} in {self.url} ends before byte {end}: {part.nbytes} of {out.nbytes} bytes read", key=key
            )
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(part, np.uint8))

    async def list(self, prefix: str) -> list[Entry]:
        check_prefix(prefix)
        self._check_open()
        start = f"{prefix}/" if prefix else ""
        found: dict[str, Entry] = {}
        for key, data in self._objects.items():
            if key.startswith(start):
                name, deeper, _ = key[len(start) :].partition("/")
                found[name] = Entry(name, 0 if deeper else data.nbytes, bool(deeper))
        return [found[name] for name in sorted(found)]

    async def stat(self, key: str) -> int | None:
        self._check(key)
        found = self._objects.get(key)
        return None if found is None else found.nbytes

    async def delete(self, key: str, *, durable: bool = True) -> None:
        self._check(key)
        self._objects.pop(key, None)

    async def settle(self, key: str) -> None:
        self._get(key)

    async def sweep(self) -> int:
        self._check_open()
        return 0

    async def close(self) -> None:
        self._closed = True

    def complete(self, key: str, data: memoryview) -> None:
        """Take over what a writer has finished."""
        self._check_open()
        self._objects[key] = data
        self.abandon(key)

    def abandon(self, key: str) -> None:
        """Give up the name of an unfinished object."""
        self._open_writers.discard(key)

    def _get(self, key: str) -> memoryview:
        self._check(key)
        if key not in self._objects:
            raise NotFoundError(f"there is no object {key!r} in {self.url}")
        return self._objects[key]

    def _check(self, key: str) -> None:
        check_key(key)
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the store {self.url} is closed")


class MemoryWriter:
    """Writes a large object, which becomes visible when it is finished."""

    def __init__(self, store: MemoryStore, key: str, size_hint: int) -> None:
        self._store, self._key = store, key
        self._bytes = np.zeros(size_hint, np.uint8)
        self._ended = False

    async def write_at(self, offset: int, data: Buffer) -> None:
        part = np.frombuffer(memoryview(data), np.uint8)
        self._grow(offset + part.size)
        np.copyto(self._bytes[offset : offset + part.size], part)

    async def finish(self, size: int) -> None:
        if self._ended:
            raise StoreError(f"finishing {self._key!r} in {self._store.url} failed: it was finished or discarded before")
        self._grow(size)
        self._ended = True
        self._store.complete(self._key, self._bytes[:size].data.toreadonly())

    async def discard(self) -> None:
        if not self._ended:
            self._ended = True
            self._store.abandon(self._key)

    def _grow(self, size: int) -> None:
        if size > self._bytes.size:
            larger = np.zeros(max(size, 2 * self._bytes.size), np.uint8)
            np.copyto(larger[: self._bytes.size], self._bytes)
            self._bytes = larger
