"""The place to which a root is exported: a directory, or a prefix in a bucket, with a directory of files for each checkpoint.

Invariants
  TARGET-1  Nothing is replaced or removed there that is not an export's. What other programs put into the directory of an
      export keeps it from being removed.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Protocol

from checkpointd import arguments
from checkpointd.bucket_urls import is_bucket_url
from checkpointd.export.bucket_output import BucketOutput, place_in, record_at, removed
from checkpointd.export.output import ExportOutput, Output, on_thread, translated
from checkpointd.export.record import NAME, ExportRecord
from checkpointd.layout.keys import is_tag
from checkpointd.store import open_store
from checkpointd.store.base import Store, each
from checkpointd.store.conditions import check_conditions_of

_MARK = "export"
_LEFT = re.compile(rf"\..*\.{_MARK}-[0-9a-f]{{12}}(\.replaced)?\Z")


class ExportTarget(Protocol):
    """The place of exports. `store` opens it for leases and records."""

    store: Store

    def place(self, tag: str) -> str:
        """Where the export of `tag` lies, for messages."""
        ...

    async def begin(self) -> None:
        """Make the place if it is missing."""
        ...

    async def clean(self) -> None:
        """Remove what dead processes left unfinished. Only for the process that holds the place."""
        ...

    def output(self, tag: str, check: Callable[[], Awaitable[None]]) -> ExportOutput:
        """The output for the checkpoint `tag`. It replaces an earlier export of that tag. `check`: see BucketOutput."""
        ...

    async def remove(self, tag: str, record: ExportRecord) -> bool:
        """Remove an export; False if files of other programs lie in it."""
        ...


def target_at(place: str) -> ExportTarget:
    """The target at a path, or at the URL of a bucket. UsageError if there is no such store."""
    return BucketTarget(open_store(place)) if is_bucket_url(place) else DirectoryTarget(place)


async def records_at(store: Store, tags: Sequence[str] | None = None) -> dict[str, ExportRecord | None]:
    """`tags`, or every name at a target that may be a tag, with the record of the export there; None if that is no export."""
    names = [entry.name for entry in await store.list("") if is_tag(entry.name)] if tags is None else tags
    found = await each(partial(record_at, store), names)
    return dict(zip(names, found, strict=True))


class DirectoryTarget:
    """A directory. An export appears there by one rename."""

    def __init__(self, place: str) -> None:
        self._place = os.path.abspath(arguments.expanded(place))
        self.store = open_store(self._place)

    def place(self, tag: str) -> str:
        return os.path.join(self._place, tag)

    async def begin(self) -> None:
        await on_thread(self._make)

    def _make(self) -> None:
        with translated("creating", self._place):
            os.makedirs(self._place, exist_ok=True)

    async def clean(self) -> None:
        await on_thread(self._clean)

    def _clean(self) -> None:
        with translated("cleaning", self._place):
            for name in os.listdir(self._place):
                if _LEFT.match(name):
                    shutil.rmtree(os.path.join(self._place, name), ignore_errors=True)

    def output(self, tag: str, check: Callable[[], Awaitable[None]]) -> ExportOutput:
        return Output(self.place(tag), directory=True, force=True, mark=_MARK)

    async def remove(self, tag: str, record: ExportRecord) -> bool:
        return await on_thread(lambda: self._remove(tag, record))

    def _remove(self, tag: str, record: ExportRecord) -> bool:
        place = os.path.join(self._place, tag)
        with translated("removing", place):
            if not {*record.files, NAME}.issuperset(os.listdir(place)):
                return False
            hidden = os.path.join(self._place, f".{tag[:100]}.{_MARK}-{secrets.token_hex(6)}")
            os.rename(place, hidden)
            shutil.rmtree(hidden)
        return True


class BucketTarget:
    """A prefix in a bucket."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._is_checked = False

    def place(self, tag: str) -> str:
        return place_in(self.store, tag)

    async def begin(self) -> None:
        """The lease needs a server that honours conditions. ConditionsIgnoredError if this one does not."""
        if not self._is_checked:
            await check_conditions_of(self.store, new=False)
            self._is_checked = True

    async def clean(self) -> None:
        """What is unfinished is found by its record, and replaced."""

    def output(self, tag: str, check: Callable[[], Awaitable[None]]) -> ExportOutput:
        return BucketOutput(self.store, tag, force=True, check=check)

    async def remove(self, tag: str, record: ExportRecord) -> bool:
        names = {entry.name for entry in await self.store.list(tag)}
        if not {*record.files, NAME}.issuperset(names):
            return False
        await removed(self.store, tag, [*record.files])
        return True
