"""The requests to a bucket that the store is made of. The real bucket and the simulated one implement them.

Invariants
  BUCKET-1  A request that has returned is durable and visible to every later request, lists included.
  BUCKET-2  A request that raised may have been carried out, or may still be carried out later.
  BUCKET-3  An answer may be that of a repetition: `create` and `replace` may return False although this very call has written
      the object. The mark tells: it is stored with the object, and no two calls have the same one.
  BUCKET-4  A try that its own repetition has overtaken may still be carried out after the answer. A `put` may then bring an
      older content back, and a `delete` take away what was put since. So nothing rests on objects that several processes put
      without a condition.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import Buffer

from checkpointd.store.base import Entry
from checkpointd.store.requests import Requests
from checkpointd.store.uploads import UnfinishedUpload


@dataclass(frozen=True, slots=True)
class Version:
    """One content of one object, as the server names it. A server uses one of the two, or both."""

    e_tag: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class ObjectHead:
    """An object without its bytes. `mark`: of the `create` or `replace` that wrote it, or "" if a `put` or `upload` did.

    `written`: when it was written, in seconds since 1970 by the server's clock. It is for people; no decision uses it.
    """

    size: int
    version: Version
    mark: str = ""
    written: float = 0.0


class Bucket(Protocol):
    """One bucket, or the part of it below a prefix. Keys are those of the store.

    Errors: a StoreError that names the key and the server's reason; an UnreadableError for `get`, `get_range`, `look` and
    `list`; NotFoundError if the object is not there.
    """

    @property
    def url(self) -> str:
        """The place, for messages; never a secret."""
        ...

    @property
    def requests(self) -> Requests: ...

    async def create(self, key: str, data: bytes, mark: str) -> bool:
        """Put `key` if there is no such object. False: there is one (BUCKET-3)."""
        ...

    async def replace(self, key: str, data: bytes, version: Version, mark: str) -> bool:
        """Put `key` if the object has `version`. False: it has another one, or is not there (BUCKET-3)."""
        ...

    async def put(self, key: str, data: Buffer) -> None:
        """Put `key`, whatever is there."""
        ...

    async def upload(self, key: str, parts: AsyncIterator[Buffer], part_bytes: int) -> None:
        """Put `key` from `parts`, several of them at once. All but the last have `part_bytes` bytes.

        The iterator must not keep a part that it has yielded: a part may be reused once nobody refers to it. If the iterator
        raises, nothing is put.
        """
        ...

    async def get(self, key: str, size_max: int) -> tuple[bytes, ObjectHead] | int:
        """The object, or only its size if that is more than `size_max`."""
        ...

    async def get_range(self, key: str, offset: int, nbytes: int) -> Buffer:
        """At most `nbytes` (at least 1) from `offset` on; fewer only where the object ends."""
        ...

    async def look(self, key: str) -> ObjectHead | None:
        """The object without its bytes; None if it is not there."""
        ...

    async def list(self, prefix: str) -> list[Entry]:
        """The children of `prefix`, sorted by name."""
        ...

    async def delete(self, keys: Sequence[str]) -> None:
        """Remove these objects; it is no error if one is not there. If one fails, others may stay."""
        ...

    async def unfinished(self) -> Sequence[UnfinishedUpload]:
        """The uploads that were neither completed nor aborted, those under way included."""
        ...

    async def abort(self, upload: UnfinishedUpload) -> None:
        """Give up `upload`; no error if it is not there any more."""
        ...

    async def close(self) -> None: ...
