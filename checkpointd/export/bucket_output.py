"""The output of an export in a bucket, where nothing can be renamed: the files by which programs find the others come last.

Invariants
  BUCKETOUT-1  The order is: the record, without `complete`; the weights, each object as a whole; the other files; the index;
      then `config.json`, and the record with `complete`. What is replaced goes in the reverse order. So a program that reads
      `config.json` or the index first never finds half of an export, or a mixture of two.
  BUCKETOUT-2  Objects are replaced or removed only with `force`, and only if all of them are an export's.
  BUCKETOUT-3  An export that fails removes its objects as far as possible. A process that is killed leaves them, with a record
      without `complete`; the next export to the place replaces them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import groupby
from types import TracebackType
from typing import Self

import msgspec

from checkpointd.bucket_urls import is_bucket_url, parse
from checkpointd.errors import CheckpointdError, FormatError, NotFoundError, UsageError
from checkpointd.export.output import FilePart, is_export_name
from checkpointd.export.record import NAME, RECORD_BYTES_MAX, ExportRecord, decode, encode, in_order
from checkpointd.store.base import ObjectWriter, Store, each
from checkpointd.store.uploads import abort_upload_of, unfinished_uploads_of


async def _allowed() -> None:
    """The check if no other process exports to the place: nothing to do."""


class BucketOutput:
    """An export in progress below `prefix` of a store. `check` raises if somebody else exports to the place by now."""

    def __init__(
        self, store: Store, prefix: str, *, force: bool = False, check: Callable[[], Awaitable[None]] = _allowed
    ) -> None:
        self.place = place_in(store, prefix)
        self._store, self._prefix, self._force, self._check = store, prefix, force, check
        self._heads: dict[str, bytes] = {}
        self._sizes: dict[str, int] = {}
        self._record: ExportRecord | None = None
        self._there: list[str] = []
        """The objects of an earlier export."""
        self._begun = self._shown = False
        self._writer: ObjectWriter | None = None
        self._name, self._written = "", 0
        """The file that is being written, and how many bytes of it were."""

    async def __aenter__(self) -> Self:
        """UsageError if something is in the way."""
        self._there = [entry.name for entry in await self._store.list(self._prefix) if not entry.is_prefix]
        if not self._there:
            return self
        record = await record_at(self._store, self._prefix)
        known = set() if record is None else set(record.files)
        other = next((name for name in self._there if not (is_export_name(name) or name in known)), None)
        if other is not None:
            raise UsageError(f"{self.place} holds {other!r}, which no export made: give another place")
        if not self._force:
            raise UsageError(f"{self.place} holds an export and is not overwritten: give another place, or --force")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            await self._writer.discard()
        if self._begun and not self._shown:
            with suppress(CheckpointdError):
                await self._check()
                await removed(self._store, self._prefix, self._sizes)

    def path(self, name: str) -> str:
        return name

    def create(self, name: str, head: bytes, size: int) -> str:
        self._heads[name], self._sizes[name] = head, size
        return name

    def describe(self, record: ExportRecord) -> None:
        self._record = msgspec.structs.replace(record, complete=False, files=tuple(sorted(self._sizes)))

    async def write(self, parts: Sequence[FilePart]) -> None:
        await self._begin()
        for name, group in groupby(parts, lambda part: part.path):
            if name != self._name:
                await self._finish()
                await self._open(name)
            await self._write(list(group))

    async def show(self) -> list[tuple[str, int]]:
        await self._begin()
        await self._finish()
        assert self._record is not None
        for name in in_order(self._heads):
            await self._check()
            await self._store.put(self._key(name), self._heads[name])
        record = encode(msgspec.structs.replace(self._record, complete=True))
        await self._store.put(self._key(NAME), record)
        self._shown = True
        return sorted([*self._sizes.items(), (NAME, len(record))])

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    async def _begin(self) -> None:
        """Put the record, then remove what an earlier export has left (BUCKETOUT-1)."""
        if self._begun:
            return
        assert self._record is not None, "describe() comes first"
        await self._check()
        # Until the old objects are gone, the record names them, too: the next export must know them if this one ends now.
        both = tuple(sorted({*self._record.files, *(name for name in self._there if name != NAME)}))
        await self._store.put(self._key(NAME), encode(msgspec.structs.replace(self._record, files=both)))
        self._begun = True
        await removed(self._store, self._prefix, [name for name in self._there if name != NAME], record=False)
        for upload in await unfinished_uploads_of(self._store):
            if upload.key.rpartition("/")[0] == self._prefix:
                await abort_upload_of(self._store, upload)

    async def _open(self, name: str) -> None:
        await self._check()
        self._writer = await self._store.open_writer(self._key(name), size_hint=self._sizes[name])
        self._name, self._written = name, 0
        await self._write([FilePart(name, 0, memoryview(self._heads.pop(name)))])

    async def _write(self, parts: Sequence[FilePart]) -> None:
        writer = self._writer
        assert writer is not None

        async def write(part: FilePart) -> None:
            await writer.write_at(part.offset, part.data)

        await each(write, parts)
        self._written += sum(part.data.nbytes for part in parts)

    async def _finish(self) -> None:
        """Complete the object that is being written."""
        writer, size = self._writer, self._sizes.get(self._name, 0)
        if writer is None:
            return
        assert self._written == size, f"{self._name} has {self._written} of {size} bytes"
        await self._check()
        await writer.finish(size)
        self._writer = None


def place_in(store: Store, prefix: str) -> str:
    """The URL of `prefix` in `store`."""
    if not prefix:
        return store.url
    return parse(store.url).below(prefix).url if is_bucket_url(store.url) else f"{store.url}/{prefix}"


async def record_at(store: Store, prefix: str) -> ExportRecord | None:
    """The record of the export below `prefix`; None if there is none, or if it is damaged."""
    try:
        return decode(await store.get(f"{prefix}/{NAME}" if prefix else NAME, size_max=RECORD_BYTES_MAX))
    except (NotFoundError, FormatError):
        return None


async def removed(store: Store, prefix: str, names: Sequence[str] | dict[str, int], *, record: bool = True) -> None:
    """Remove the files `names` of an export, first those by which programs find the others, and the record at the end."""
    keys = [f"{prefix}/{name}" if prefix else name for name in reversed(in_order(dict.fromkeys(names, b"")))]
    for key in keys[:2]:
        await store.delete(key)
    await store.delete_each(keys[2:])
    if record:
        await store.delete(f"{prefix}/{NAME}" if prefix else NAME)
