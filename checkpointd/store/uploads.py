"""Lists and aborts unfinished uploads: a capability of stores in a bucket.

A killed writer leaves its multipart upload behind. No listing shows it, and its parts are charged until somebody aborts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class UnfinishedUpload:
    """An upload of the object `key` that was begun and neither completed nor aborted. `number`: the server's name for it."""

    key: str
    number: str


@runtime_checkable
class SupportsUploads(Protocol):
    """A store whose large objects are uploaded in parts."""

    async def unfinished_uploads(self) -> Sequence[UnfinishedUpload]:
        """All of them, those under way included; empty if they end by themselves. UnreadableError if they cannot be listed."""
        ...

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        """Free the parts of `upload`. Its writer, if there is one, fails. Does nothing if it is not there any more."""
        ...


async def unfinished_uploads_of(store: Store) -> Sequence[UnfinishedUpload]:
    """Those of any store; empty if it has none."""
    return await store.unfinished_uploads() if isinstance(store, SupportsUploads) else []


async def abort_upload_of(store: Store, upload: UnfinishedUpload) -> None:
    """Abort an upload that `unfinished_uploads_of` has listed."""
    assert isinstance(store, SupportsUploads)
    await store.abort_upload(upload)
