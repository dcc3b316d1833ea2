"""The store contract: what every back end promises. `testing/contract.py` is the suite that each of them passes.

Durable: after the call has returned, a power cut loses nothing of it. Visible: another process sees it from then on.

Invariants
  STORE-1  `put_if_absent` has one winner among any number of racing processes and machines, and a reader sees the winner's
      bytes whole or nothing. When it returns, with True or False, the object is durable.
  STORE-2  `put` and `put_if_match` replace whole: a reader sees the old bytes or the new ones, also after a power cut.
  STORE-3  An object written by `open_writer` is durable when `finish` has returned. Before that it may be visible, torn or
      absent: nothing may refer to it. Its key is new: writing an existing key is refused.
  STORE-4  What `get`, `stat` or `list` show may still be lost by a power cut until its writer has returned, or `settle` has.
  STORE-5  `delete` of what is not there succeeds. A store removes only what it is told to remove.
  STORE-6  Every system error leaves as a StoreError (StoreFullError where space or quota is used up) that names the key and
      the reason; from `get`, `get_range`, `list`, `stat` and `settle` as an UnreadableError, whatever its number is.
      NotFoundError says what this look saw. On a network file system the next one may see the object.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from typing_extensions import Buffer

SMALL_BYTES_MAX = 64 * 1024 * 1024
"""Above this size an object is not read by `get` in one piece unless the caller says how large it may be."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One child of a prefix: an object with its size in bytes, or a deeper prefix (`is_prefix`, size 0)."""

    name: str
    size: int
    is_prefix: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a back end can do beyond the contract."""

    alignment: int
    """Writes whose offset, length and address are multiples of this many bytes go without a copy; 1: it does not matter."""
    shared: bool
    """Whether other processes can see this store."""
    piece_bytes: int | None = None
    """Larger writes to large objects are cut into pieces of so many bytes, with pauses between; None: they are not."""


class ObjectWriter(Protocol):
    """One large object being written. Parts may come in any order and concurrently, never overlapping."""

    async def write_at(self, offset: int, data: Buffer) -> None:
        """Write `data` at byte `offset`. The caller keeps `data` unchanged until this returns.

        What is large has left the system's cache then, where the back end can tell: progress counts it as written.
        """
        ...

    async def finish(self, size: int) -> None:
        """Cut the object to `size` bytes and make it durable (STORE-3).

        Where this raises, or a `write_at` did, the object is lost: `discard` it. `finish` then keeps raising.
        """
        ...

    async def discard(self) -> None:
        """Drop the object, as far as that is possible; never raises. After `finish` it does nothing."""
        ...


class Store(Protocol):
    """Named objects below one root. Keys are relative, `/`-separated, and never contain `..`: others raise UsageError.

    A key is never the beginning of another one up to a `/` ("a" and "a/b"): a file system refuses the second.
    A call that was cancelled may have had its effect, or not.
    """

    @property
    def url(self) -> str:
        """Where this store is, for messages."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def uncached(self) -> Store:
        """The same objects, whose bytes are read from the storage itself and not from this machine's cache of it, as far as the
        back end can. It needs no closing, and is of no use once this store is closed.
        """
        ...

    async def put_if_absent(self, key: str, data: bytes) -> bool:
        """Create `key`; False where it already exists. Durable either way (STORE-1)."""
        ...

    async def put(self, key: str, data: bytes) -> None:
        """Create or replace `key` atomically and durably (STORE-2)."""
        ...

    async def put_if_match(self, key: str, expected: bytes | None, data: bytes) -> bool:
        """Replace `key` if its content is `expected` (None: absent, or a symbolic link, whose name it takes); False where it is
        not (STORE-2).
        """
        ...

    async def open_writer(self, key: str, *, size_hint: int = 0) -> ObjectWriter:
        """Start a large object; `size_hint` bytes are reserved where the back end can, so that a full disk shows at once."""
        ...

    async def get(self, key: str, *, size_max: int = SMALL_BYTES_MAX) -> bytes:
        """The whole object. NotFoundError where there is none, DamagedError where it is larger than `size_max`."""
        ...

    async def get_range(self, key: str, offset: int, out: memoryview) -> None:
        """Fill `out` from byte `offset`. NotFoundError, or DamagedError where the object ends before."""
        ...

    async def list(self, prefix: str) -> list[Entry]:
        """The children of `prefix` (`""` for the root), sorted by name; empty where there is nothing.

        A prefix may be listed although nothing lies under it (any more).
        """
        ...

    async def stat(self, key: str) -> int | None:
        """Size of the object in bytes, or None."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the object, durably (STORE-5)."""
        ...

    async def settle(self, key: str) -> None:
        """Make durable what is visible of `key` (STORE-4), for readers that act on what they saw. NotFoundError
        where it is not.
        """
        ...

    async def sweep(self) -> int:
        """Remove what interrupted calls of dead writers left behind (never an object); how many pieces went."""
        ...

    async def close(self) -> None:
        """Release what the store holds; it cannot be used afterwards."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
