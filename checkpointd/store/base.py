"""The store contract: the promises that every back end keeps. Each back end passes the suite in `testing/contract.py`.

Durable: a power cut after the call has returned loses nothing. Visible: other processes see the object from then on.

Invariants
  STORE-1  `put_if_absent` has one winner among any number of racing processes and machines, and a reader sees all of the
      winner's bytes or nothing. When the call returns, with True or False, the object is durable, unless the caller has said
      `durable=False`. Then a power cut may take the object away or leave it torn, until somebody settles it.
  STORE-2  `put`, `put_if_match` and `open_replacement` replace an object as a whole: a reader sees the old bytes or the new
      ones, also after a power cut. The new ones are durable when the call, or `finish`, has returned.
  STORE-3  An object written by `open_writer` is durable when `finish` has returned. Before that, the object may be visible,
      torn or absent, and nothing may refer to it. The key is new: `open_writer` refuses an existing key.
  STORE-4  `get`, `stat` and `list` may show an object that a power cut can still take away. It is safe once its writer's call
      or `settle` has returned.
  STORE-5  `delete` succeeds if the object is not there. A store removes only the objects that it is told to remove. A power cut
      may bring an object back that was removed with `durable=False`.
  STORE-6  Every system error becomes a StoreError (StoreFullError if space or quota is used up) that names the key and the
      reason. Calls that only read (`get`, `get_range`, `get_parts`, `list`, `stat`, `settle`) raise an UnreadableError for any
      system error. NotFoundError means that this call did not see the object; on a network file system the next call may.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, TypeVar

import msgspec
from typing_extensions import Buffer

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, StoreError
from checkpointd.waits import to_the_end

T = TypeVar("T")
K = TypeVar("K")

SMALL_BYTES_MAX = 64 * 1024 * 1024
"""`get` reads a larger object only if the caller passes a larger `size_max`."""

EACH = 16
"""The number of calls at once for many objects."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One child of a prefix: an object with its size in bytes, or a deeper prefix (`is_prefix`, size 0)."""

    name: str
    size: int
    is_prefix: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Properties of a back end that are not part of the contract."""

    alignment: int
    """Writes are not copied if their offset, length and address are multiples of this; 1: alignment does not matter."""
    shared: bool
    """Whether other processes can see this store."""
    gap_bytes: int = 64 * 1024
    """Reading so many bytes that nobody needs costs less than a second read."""
    at_once: int = 1
    """The reads, or writes, of large objects that should be under way at once, because each waits for a server."""
    read_bytes: int = 0
    """Where each read is a request: the bytes of a good one. The store receives them in memory of its own, and copies them."""
    look_s: float = 0.0
    """Seconds between two looks for what others write. Where each look is charged or limited, it is greater than 0."""
    can_be_full: bool = True
    """Whether the room is limited, as on a disk, so that a job should keep some in reserve."""
    can_lose: bool = True
    """Whether a power cut may take away what is visible and was not settled (STORE-4), as on a disk."""
    piece_bytes: int | None = None
    """The store cuts larger writes into pieces of this many bytes and pauses between them; None: it does not cut them."""


async def each(call: Callable[[K], Awaitable[T]], given: Sequence[K], at_once: int = EACH) -> list[T]:
    """The results of `call` for each of `given`, `at_once` of them at a time. The first error
    cancels the others, and is raised once they have ended.
    """
    if len(given) == 1:
        return [await call(given[0])]
    found: dict[int, T] = {}
    left = iter(enumerate(given))

    async def worker() -> None:
        for place, one in left:
            found[place] = await call(one)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(at_once, len(given)))]
    try:
        await asyncio.gather(*workers)
    except BaseException:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        raise
    return [found[place] for place in range(len(given))]


class ObjectWriter(Protocol):
    """One large object being written. Parts may come in any order and concurrently, never overlapping."""

    async def write_at(self, offset: int, data: Buffer) -> None:
        """Write `data` at byte `offset`. The caller keeps `data` unchanged until this returns.

        Bytes far ahead of all that was written may wait for those before them.

        A large write has then left the system's cache, if the back end can tell, so progress counts it as written.
        """
        ...

    async def finish(self, size: int) -> None:
        """Cut the object to `size` bytes and make it durable (STORE-3).

        A back end need not cut off more than the last `Capabilities.alignment` bytes, less one.
        If this call or a `write_at` raised, the object is lost and every later `finish` raises, too: call `discard`.
        """
        ...

    async def discard(self) -> None:
        """Remove the object as far as possible. Never raises, and does nothing after `finish`."""
        ...


class Store(Protocol):
    """Named objects below one root. Keys are relative, `/`-separated and without `..`; other keys raise UsageError.

    Never use one key as the directory of another ("a" and "a/b"): a file system refuses the second.
    A cancelled call may or may not have had its effect.
    """

    @property
    def url(self) -> str:
        """The place of this store, for messages."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def uncached(self) -> Store:
        """A view of this store that reads from the storage itself instead of this machine's cache, if the back end can.

        Only close the store itself; the view ends with it.
        """
        ...

    async def put_if_absent(self, key: str, data: bytes, *, durable: bool = True) -> bool:
        """Create `key`; False if it already exists. Durable either way, unless `durable` is False (STORE-1)."""
        ...

    async def put(self, key: str, data: bytes) -> None:
        """Create or replace `key` atomically and durably (STORE-2)."""
        ...

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace `key` if its content is `expected`, else return False (STORE-2). None expects that there is no object; the
        object then also replaces a symbolic link of that name.
        """
        ...

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        """Start a large object. Reserves `size_hint` bytes if the back end can, so that a full disk fails at once.

        `size_max`: the object will not be larger, as far as is known (0: `size_hint` is all that is known).
        """
        ...

    async def open_replacement(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        """Start a large object that takes the place of any object of that name when `finish` is called (STORE-2).

        Until then, and after `discard`, the old one is there as before. Reserves `size_hint` bytes as `open_writer` does.
        """
        ...

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        """The whole object. NotFoundError if there is none, DamagedError if it is larger than `size_max`."""
        ...

    async def get_each(self, keys: Sequence[str], *, size_max: int = SMALL_BYTES_MAX) -> list[bytes | CheckpointdError]:
        """Each whole object of `keys`, or the error that `get` raises for it; in few calls if the back end can."""

        async def read(key: str) -> bytes | CheckpointdError:
            try:
                return await self.get(key, size_max=size_max)
            except (NotFoundError, DamagedError, StoreError) as error:
                return error

        return await each(read, keys)

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset`. NotFoundError if there is no object, DamagedError if it is too short."""
        ...

    async def get_parts(self, key: str, offset: int, parts: Sequence[memoryview], then: Callable[[], T]) -> T:
        """Fill `parts` one after the other from byte `offset`, as `get_range` does, in one read if the back end can.

        Returns the result of `then`, which is called on a thread once they are filled: if the back end can, on the thread that
        has read.
        """
        for part in parts:
            await self.get_range(key, offset, part)
            offset += part.nbytes
        return await to_the_end(asyncio.get_running_loop().run_in_executor(None, then))

    async def list(self, prefix: str) -> list[Entry]:
        """The children of `prefix` (`""` for the root), sorted by name; empty if there are none.

        A prefix may be listed although no object lies under it. The sizes of a log's objects may be missing (0).
        """
        ...

    async def stat(self, key: str) -> int | None:
        """Size of the object in bytes, or None."""
        ...

    async def delete(self, key: str, *, durable: bool = True) -> None:
        """Remove the object, durably unless `durable` is False (STORE-5)."""
        ...

    async def delete_each(self, keys: Sequence[str]) -> None:
        """Remove these objects, durably, as `delete` does; in few calls if the back end can. If one fails, others may stay."""
        await each(self.delete, keys)

    async def settle(self, key: str) -> None:
        """Make the visible object `key` durable (STORE-4), for readers that act on it. NotFoundError if there is none."""
        ...

    async def sweep(self) -> int:
        """Remove temporary files that dead writers left behind, never an object. Returns how many it removed."""
        ...

    async def close(self) -> None:
        """Release threads and memory; the store cannot be used afterwards."""
        ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
