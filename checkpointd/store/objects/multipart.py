"""Writes a large object as a multipart upload, out of the caller's memory.

Invariants
  MULTIPART-1  A part that lies whole in one write goes from the caller's memory to the network. Only bytes around the borders
      of parts are copied, and writes that come ahead of their turn.
  MULTIPART-2  `write_at` returns when the server has every part that lies in the caller's memory. So the calls under way bound
      the parts under way, and AHEAD_BYTES_MAX and one part bound the copies.
  MULTIPART-3  The object appears when `finish` returns, all of it at once. A reply that is lost on the way is asked for. If
      the upload replaces an object, only another version of it is an answer, and nothing is ever removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from copy import copy
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from checkpointd.errors import StoreError
from checkpointd.store.objects.bucket import Bucket, ObjectHead
from checkpointd.waits import to_the_end

Bytes = NDArray[np.uint8]

MIB: Final = 1024 * 1024
PART_BYTES_MIN: Final = 8 * MIB
PARTS_MAX: Final = 9000
"""S3 takes 10,000 parts."""
AHEAD_BYTES_MAX: Final = 256 * MIB
"""The most bytes that are kept because bytes before them are missing. Further writes wait for those."""
ASK_S: Final = 10.0
"""How long a failed upload asks for its object, and removes it: the client has tried for long by then."""


def part_bytes_for(size: int) -> int:
    """The size of the parts of an object of at most `size` bytes (0: not known)."""
    return max(PART_BYTES_MIN, -(-size // (PARTS_MAX * MIB)) * MIB)


class _Discarded(Exception):
    """Ends an upload from within."""


class MultipartUpload:
    """The ObjectWriter of a bucket. `on_end` is called once the key is free or taken for good. `replaces`: the object of that
    name, if there is one. `removes`: whether it is nobody else's, so that `discard` may remove it.

    It is also the iterator of the parts, which the bucket takes one by one.
    """

    def __init__(
        self,
        bucket: Bucket,
        key: str,
        part_bytes: int,
        on_end: Callable[[], None],
        replaces: ObjectHead | None = None,
        *,
        removes: bool = True,
    ) -> None:
        self._bucket, self._key, self._part_bytes, self._on_end = bucket, key, part_bytes, on_end
        self._replaces, self._removes = replaces, removes
        self._next = 0
        """The first byte that has not come yet."""
        self._ahead: dict[int, Bytes] = {}
        self._moved = asyncio.Event()
        self._tail: Bytes | None = None
        self._filled = 0
        self._parts: asyncio.Queue[Bytes | None] = asyncio.Queue()
        self._sending: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._finishing = self._ended = False

    async def write_at(self, offset: int, data: Buffer) -> None:
        view = memoryview(data)
        given = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
        self._check()
        while offset > self._next:
            if not given.size or sum(kept.size for kept in self._ahead.values()) + given.size <= AHEAD_BYTES_MAX:
                self._ahead |= {offset: given.copy()} if given.size else {}
                return
            await self._moved.wait()
            self._check()
        if offset < self._next and given.size:
            raise self._failure(f"byte {offset} was written before")
        done = self._take(given)
        while (kept := self._ahead.pop(self._next, None)) is not None:
            done += self._take(kept)
        del given
        for part in done:
            await part.wait()
        self._check()

    def _take(self, data: Bytes) -> list[asyncio.Event]:
        """Send what fills a part; keep the rest as a copy."""
        done: list[asyncio.Event] = []
        self._next += data.size
        self._wake()
        while data.size:
            if self._filled or data.size < self._part_bytes:
                if self._tail is None:
                    self._tail = np.empty(self._part_bytes, np.uint8)
                taken = min(data.size, self._part_bytes - self._filled)
                self._tail[self._filled : self._filled + taken] = data[:taken]
                self._filled, data = self._filled + taken, data[taken:]
                if self._filled == self._part_bytes:
                    done.append(self._send(self._tail))
                    self._tail, self._filled = None, 0
            else:
                done.append(self._send(data[: self._part_bytes]))
                data = data[self._part_bytes :]
        return done

    def _send(self, data: Bytes) -> asyncio.Event:
        """Queue a part. The event is set once nobody refers to the part any more, so once the server has it, or never will."""
        if self._sending is None:
            self._sending = asyncio.ensure_future(self._upload())
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        part = np.frombuffer(data.data, np.uint8)  # an array of its own, whose end is seen
        weakref.finalize(part, _tell, loop, gone).atexit = False
        self._parts.put_nowait(part)
        return gone

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Buffer:
        """The next part. This is no generator, whose frame would go on referring to the part."""
        part = await self._parts.get()
        if part is not None:
            return part.data
        if self._finishing:
            raise StopAsyncIteration
        raise _Discarded

    async def _upload(self) -> None:
        """Upload the parts as they come; an error is kept for all who write."""
        try:
            await self._bucket.upload(self._key, self, self._part_bytes)
        except Exception as error:
            self._error = error.with_traceback(None)  # its frames may refer to parts
        except BaseException:
            self._error = self._failure("it was cancelled")
            raise
        finally:
            self._drop_queued()
            self._wake()

    def _wake(self) -> None:
        """Whoever waits for earlier bytes looks again."""
        self._moved.set()
        self._moved = asyncio.Event()

    def _drop_queued(self) -> None:
        """Whoever waits for parts that are queued wakes up."""
        while not self._parts.empty():
            self._parts.get_nowait()

    async def finish(self, size: int) -> None:
        self._check()
        if self._ahead:
            raise self._failure(f"byte {self._next} was never written, and byte {min(self._ahead)} was")
        cut = self._next - size
        if not 0 <= cut <= self._filled:
            raise self._failure(f"{size} bytes are to stay of {self._next}, and the server has more already")
        self._finishing = True
        tail = np.empty(0, np.uint8) if self._tail is None else self._tail[: self._filled - cut]
        try:
            if self._sending is None:
                await self._bucket.put(self._key, tail.data)
            else:
                if tail.size:
                    self._send(tail)
                self._parts.put_nowait(None)
                await to_the_end(self._sending)
                self._check()
        except StoreError as error:
            if not await self._is_there(size):
                self._error = error
                raise
        self._end()

    async def _is_there(self, size: int) -> bool:
        """Whether the object is there all the same. Nobody else writes one of this name, and a part of one is never seen.

        An object that has the version of the one before it may be that one.
        """
        try:
            async with asyncio.timeout(ASK_S):
                found = await self._bucket.look(self._key)
        except (StoreError, TimeoutError):
            return False
        is_new = found is not None and (self._replaces is None or found.version != self._replaces.version)
        return found is not None and is_new and found.size == size

    async def discard(self) -> None:
        if self._ended:
            return
        finishing, self._finishing = self._finishing, False
        self._ended = True
        self._wake()
        if self._sending is not None:
            self._drop_queued()
            self._parts.put_nowait(None)
            await asyncio.wait([self._sending])
        if finishing and self._removes and self._replaces is None:
            with contextlib.suppress(StoreError, TimeoutError):  # the object goes with its attempt, which has failed
                async with asyncio.timeout(ASK_S):
                    await self._bucket.delete([self._key])
        self._on_end()

    def _end(self) -> None:
        self._ended = True
        self._on_end()

    def _check(self) -> None:
        if self._ended:
            raise self._failure("it was finished or discarded before")
        if self._error is not None:
            raise copy(self._error) from self._error.__cause__  # many calls may raise it, each with its own traceback

    def _failure(self, why: str) -> StoreError:
        return StoreError(f"writing {self._key!r} in {self._bucket.url} failed: {why}")


def _tell(loop: asyncio.AbstractEventLoop, gone: asyncio.Event) -> None:
    """Called on the thread that drops a part."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits
        loop.call_soon_threadsafe(gone.set)
