"""Tries whether a server honours the conditions of requests, once per root and server.

Invariants
  CONDITION-1  The record of a server says `honoured` only after this server has refused a second creation and a replacement of
      a version that never was, and has carried out the replacement of the version that it had shown. That replacement is what
      makes the record say so.
  CONDITION-2  Every other request of a trial writes `trying`. So a server that carries out what it should refuse leaves nothing
      that a later start would believe, nor does a trial that was killed.
  CONDITION-3  Several starts may try at once. A record that says `honoured` speaks for all of them: one of them has seen it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from typing import Final, Literal
from urllib.parse import parse_qs, urlsplit

import msgspec

from checkpointd.commands import command
from checkpointd.errors import ConditionsIgnoredError, NotFoundError, StoreError
from checkpointd.store.names import CONDITIONS
from checkpointd.store.objects.bucket import Bucket, ObjectHead, Version

RECORD_BYTES_MAX: Final = 4096
NEVER: Final = Version('"00000000000000000000000000000000"', "0")
"""A version that no object has."""


class ConditionsRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.conditions"):
    """What the starts at a root know of the server `server`."""

    state: Literal["trying", "honoured"]
    server: str


async def check_conditions(bucket: Bucket, *, new: bool) -> None:
    """Raise ConditionsIgnoredError if the server of `bucket` ignores conditions.

    Five small requests in three rounds, where `new`; one request at a root whose record says `honoured`.
    """
    trial = _Trial(bucket)
    if not new and await trial.is_recorded():
        return
    try:
        await trial.run()
    except ConditionsIgnoredError:
        with contextlib.suppress(StoreError):
            await bucket.delete([trial.key])
        raise


class _Trial:
    """One trial, with the record itself as the object on which it is made."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket, self._server = bucket, _server(bucket.url)
        self.key = f"{CONDITIONS}/{hashlib.sha256(self._server.encode()).hexdigest()[:16]}"

    async def is_recorded(self) -> bool:
        """Whether the record says `honoured`. A record that cannot be understood, or is of another server, does not."""
        try:
            found = await self._bucket.get(self.key, RECORD_BYTES_MAX)
            record = None if isinstance(found, int) else msgspec.json.decode(found[0], type=ConditionsRecord)
        except (NotFoundError, msgspec.DecodeError):
            return False
        return record == self._record("honoured")

    async def run(self) -> None:
        trying, mark = msgspec.json.encode(self._record("trying")), secrets.token_hex(8)
        created = await self._bucket.create(self.key, trying, mark)
        again, replaced, seen = await asyncio.gather(
            self._bucket.create(self.key, trying, secrets.token_hex(8)),
            self._bucket.replace(self.key, trying, NEVER, secrets.token_hex(8)),
            self._bucket.look(self.key),
        )
        if again:
            raise self._ignored("a second request to create it (If-None-Match) was carried out")
        if replaced:
            raise self._ignored("a request to replace a version that it never had (If-Match) was carried out")
        if created and not _keeps_marks(seen):
            raise self._ignored("the server does not show the metadata with which it was created")
        honoured, version = msgspec.json.encode(self._record("honoured")), NEVER if seen is None else seen.version
        won = await self._bucket.replace(self.key, honoured, version, secrets.token_hex(8))
        if not won and not await self.is_recorded():
            raise self._ignored("a request to replace the version that the server shows (If-Match) was refused")

    def _record(self, state: Literal["trying", "honoured"]) -> ConditionsRecord:
        return ConditionsRecord(state=state, server=self._server)

    def _ignored(self, seen: str) -> ConditionsIgnoredError:
        return ConditionsIgnoredError(
            f"{self._bucket.url} cannot be a root, because its server does not honour conditional requests: of the object "
            f"{self.key!r}, {seen}. Two decisions on one save could both win there, so nothing was begun. Update the server, "
            "take the proxy away that drops the headers If-None-Match and If-Match, or choose another server "
            f"(docs/OBJECT_STORES.md); {command('doctor', self._bucket.url)} tests it again"
        )


def _keeps_marks(seen: ObjectHead | None) -> bool:
    return seen is not None and seen.mark != ""


def _server(url: str) -> str:
    """The place at `url` and the server through which it is reached, without other options."""
    parts = urlsplit(url)
    endpoint = "".join(parse_qs(parts.query).get("endpoint", ()))
    return f"{parts.scheme}://{parts.netloc}{parts.path}" + (f" at {endpoint}" if endpoint else "")
