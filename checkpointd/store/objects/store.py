"""The store in a bucket.

Invariants
  OBJECT-1  Votes, outcomes, starts, marks and all other small objects are one request each, whose condition the server checks.
      A large object is a multipart upload without a condition, to a name that only one writer ever uses. Whoever
      replaces one that is damaged puts bytes that were verified, so it does not matter which of two comes last.
  OBJECT-2  If a conditional request is told that it lost, the object itself is asked who wrote it: each request leaves a mark
      of its own. So a reply that was lost, or a request that arrived twice, never turns a win into a loss (STORE-1). An
      object keeps the marks of the last MARKS_MAX requests, since others may have replaced it by the time it is asked.
  OBJECT-3  A request that did not come through raises, and may have had its effect.
  OBJECT-4  Nothing is durable later than it is visible, so `settle` only looks, and `durable=False` saves nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from typing import Final, Self, TypeVar

import numpy as np
from typing_extensions import Buffer

from checkpointd.errors import ClosedError, DamagedError, NotFoundError, StoreError
from checkpointd.store.base import SMALL_BYTES_MAX, Capabilities, Entry, ObjectWriter, Store, each
from checkpointd.store.names import check_key, check_prefix, is_key
from checkpointd.store.objects.bucket import Bucket
from checkpointd.store.objects.conditions import check_conditions
from checkpointd.store.objects.failures import missing
from checkpointd.store.objects.multipart import MultipartUpload, part_bytes_for
from checkpointd.store.requests import Requests
from checkpointd.store.uploads import UnfinishedUpload
from checkpointd.waits import to_the_end

T = TypeVar("T")

RANGE_BYTES: Final = 8 * 1024 * 1024
"""Longer reads are several requests at once."""
AT_ONCE: Final = 8
"""Requests for parts of large objects: one alone waits for its answer, and providers limit what one connection gets."""
ON_THREAD_BYTES_MIN: Final = 256 * 1024
"""So many bytes are copied on a thread, since that takes the loop's time."""
LOOK_S: Final = 0.2
"""Ranks that wait for each other look this often at most: each look is a request."""
MARKS_MAX: Final = 32
"""S3 takes 2 KiB beside an object."""
GAP_BYTES: Final = 1024 * 1024
"""Reading this many bytes takes about as long as another request."""


class ObjectStore(Store):
    """The objects of `bucket`. With `read_only`, every write is refused."""

    def __init__(self, bucket: Bucket, *, read_only: bool = False) -> None:
        self._bucket, self._read_only = bucket, read_only
        self._open_writers: dict[str, MultipartUpload | None] = {}
        self._closed = False

    @property
    def url(self) -> str:
        return self._bucket.url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            alignment=1,
            shared=True,
            can_be_full=False,
            can_lose=False,
            gap_bytes=GAP_BYTES,
            look_s=LOOK_S,
            at_once=AT_ONCE,
            read_bytes=RANGE_BYTES,
        )

    @property
    def requests(self) -> Requests:
        """The requests that this store has sent so far."""
        return self._bucket.requests

    @property
    def uncached(self) -> Self:
        return self

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        self._check_write("creating", key)
        mark = secrets.token_hex(8)
        return await self._bucket.create(key, data, mark) or await self._has_marked(key, mark)

    async def put(self, key: str, data: bytes) -> None:
        self._check_write("writing", key)
        await self._bucket.put(key, data)

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        if expected is None:
            return await self.put_if_absent(key, data)
        self._check_write("replacing", key)
        try:
            found = await self._bucket.get(key, len(expected))
        except NotFoundError:
            return False
        if isinstance(found, int) or found[0] != expected:
            return False
        head, mark = found[1], secrets.token_hex(8)
        marks = ".".join([mark, *filter(None, head.mark.split("."))][:MARKS_MAX])
        return await self._bucket.replace(key, data, head.version, marks) or await self._has_marked(key, mark)

    async def _has_marked(self, key: str, mark: str) -> bool:
        """Whether the object carries `mark`: the request that was told that it lost has won after all (OBJECT-2)."""
        found = await self._bucket.look(key)
        return found is not None and mark in found.mark.split(".")

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        return await self._upload("creating", key, max(size_hint, size_max), replaces=False)

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        return await self._upload("replacing", key, size_hint, replaces=True)

    async def _upload(self, doing: str, key: str, size: int, *, replaces: bool) -> ObjectWriter:
        self._check_write(doing, key)
        if key in self._open_writers:
            raise self._taken(key)
        self._open_writers[key] = None  # before the look, so that of many calls at once only one goes on
        try:
            found = await self._bucket.look(key)
            if found is not None and not replaces:
                raise self._taken(key)
        except BaseException:
            del self._open_writers[key]
            raise
        upload = MultipartUpload(self._bucket, key, part_bytes_for(size), lambda: self._drop(key), found, removes=not replaces)
        self._open_writers[key] = upload
        return upload

    def _drop(self, key: str) -> None:
        self._open_writers.pop(key, None)

    def _taken(self, key: str) -> StoreError:
        return StoreError(f"creating {key!r} in {self.url} failed: that name is taken: a large object is written once")

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        self._check(key)
        found = await self._bucket.get(key, size_max)
        if isinstance(found, int):
            raise DamagedError(f"{key!r} in {self.url} is larger than the {size_max} bytes allowed", key=key)
        return found[0]

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        await self.get_parts(key, offset, [out], _nothing)

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        self._check(key)
        nbytes = sum(part.nbytes for part in parts)
        if not nbytes:
            await self.settle(key)
        ranges = [(at, min(RANGE_BYTES, nbytes - at)) for at in range(0, nbytes, RANGE_BYTES)]
        found = await each(lambda one: self._range(key, offset + one[0], one[1]), ranges, AT_ONCE)
        if nbytes < ON_THREAD_BYTES_MIN and then is _nothing:
            _scatter(found, parts)
            return then()
        loop = asyncio.get_running_loop()
        return await to_the_end(loop.run_in_executor(None, _scattered, found, parts, then))

    async def _range(self, key: str, offset: int, nbytes: int) -> Buffer:
        found = await self._bucket.get_range(key, offset, nbytes)
        read = memoryview(found).nbytes
        if read < nbytes:
            end = offset + nbytes
            raise DamagedError(f"{key!r} in {self.url} ends before byte {end}: {read} of {nbytes} bytes read", key=key)
        return found

    async def list(self, prefix: str) -> list[Entry]:
        check_prefix(prefix)
        self._check_open()
        return [entry for entry in await self._bucket.list(prefix) if is_key(entry.name)]

    async def stat(self, key: str) -> int | None:
        self._check(key)
        found = await self._bucket.look(key)
        return None if found is None else found.size

    async def delete(self, key: str, *, durable: bool = True) -> None:
        await self.delete_each([key])

    async def delete_each(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._check_write("removing", key)
        if keys:
            await self._bucket.delete(keys)

    async def settle(self, key: str) -> None:
        if await self.stat(key) is None:
            raise missing(key, self.url)

    async def unfinished_uploads(self) -> Sequence[UnfinishedUpload]:
        self._check_open()
        return await self._bucket.unfinished()

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        self._check_write("aborting the upload of", upload.key)
        await self._bucket.abort(upload)

    async def check_conditions(self, *, new: bool) -> None:
        self._check_open()
        await check_conditions(self._bucket, new=new)

    async def sweep(self) -> int:
        self._check_open()
        return 0

    async def close(self) -> None:
        """End the uploads that are under way; their objects never appear."""
        self._closed = True
        for upload in [*self._open_writers.values()]:
            if upload is not None:
                await upload.discard()
        await self._bucket.close()

    def _check(self, key: str) -> None:
        check_key(key)
        self._check_open()

    def _check_write(self, doing: str, key: str) -> None:
        self._check(key)
        if self._read_only:
            raise StoreError(f"{doing} {key!r} in {self.url} failed: this store was opened to be read, not to be written to")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the store {self.url} is closed")


def _nothing() -> None:
    """What follows a read of which nothing follows."""


def _scattered(found: Sequence[Buffer], parts: Sequence[memoryview], then: Callable[[], T]) -> T:
    _scatter(found, parts)
    return then()


def _scatter(found: Sequence[Buffer], parts: Sequence[memoryview]) -> None:
    """Copy the bytes of `found`, one after the other, into `parts`, which have as many bytes together."""
    targets = (np.frombuffer(part, np.uint8) for part in parts if part.nbytes)
    target = next(targets, _EMPTY)
    for one in found:
        source = np.frombuffer(memoryview(one), np.uint8)
        while source.size:
            taken = min(source.size, target.size)
            np.copyto(target[:taken], source[:taken])
            source, target = source[taken:], target[taken:]
            if not target.size:
                target = next(targets, _EMPTY)


_EMPTY = np.empty(0, np.uint8)
