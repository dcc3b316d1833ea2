"""The id of a root, and the check that a path still leads to the root at which a process began.

Invariant
  LOG-12  Before each append and each removal, a process that works at a root looks whether `log/root` is still the object that
      it saw first: the same id, and in the same directory, or at least the same file. No entry follows a gap.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from checkpointd.errors import DamagedError, NotFoundError, RootGoneError, UnreadableError
from checkpointd.layout.keys import LOG_ROOT
from checkpointd.layout.manifest import VERSION, WriterIdentity, decode_sealed, is_of_another_version, sealed
from checkpointd.pipeline.identity import writer
from checkpointd.store.base import Store
from checkpointd.store.identity import Identity, forget_synced, identity_of
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.waits import ABSENCE_S

log = logging.getLogger("checkpointd")


class RootId(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.root"):
    """Tells a root from all others."""

    version: int = VERSION
    id: str
    """Random; 32 hexadecimal digits."""
    writer: WriterIdentity


async def read_id(store: Store) -> str:
    """The id of the root. Raises NotFoundError if the root has none, DamagedError if it cannot be read."""
    return _id_in(await store.get(LOG_ROOT))


@lru_cache(maxsize=64)
def _id_in(data: bytes) -> str:
    """Each look at a log in a bucket asks, and it is nearly always the same."""
    return decode_sealed(data, RootId, LOG_ROOT, lambda _: None).id


async def made_id(store: Store) -> str:
    """The id of the root, which this makes if there is none, or if that is damaged. Raises FormatError if a newer release has
    made it.
    """
    new = RootId(id=secrets.token_hex(16), writer=writer())
    data = sealed(msgspec.json.format(msgspec.json.encode(new), indent=2))
    if await store.put_if_absent(LOG_ROOT, data):
        return new.id
    try:
        return await read_id(store)
    except DamagedError as error:
        damaged = await store.get(LOG_ROOT)
        if is_of_another_version(damaged):
            raise
        log.error("%s; %s gets a new id", error, store.url)
        return new.id if await store.put_if_match(LOG_ROOT, damaged, data) else await read_id(store)


@dataclass(slots=True, eq=False)
class OwnId:
    """The root with the id `own` at `store`, as a process that works there knows it; by default the one that it sees first."""

    store: Store
    own: str = ""
    _identity: Identity | None = field(default=None, init=False)
    _is_gone: bool = field(default=False, init=False)
    """Whether the last look proved that it is gone. Then the next look needs no proof to say so again."""

    async def replaced(self) -> OwnId | None:
        """The root that lies there now, by one look; None if it is this one. Raises NotFoundError or DamagedError if it has no
        id that can be read.
        """
        identity = await identity_of(self.store, LOG_ROOT)
        if identity is not None and identity == self._identity:
            return None
        found = OwnId(self.store, await read_id(self.store))
        is_same = identity is None or self._identity is None or identity.is_same_root(self._identity)
        found._identity = identity
        return None if found.own == self.own and is_same else found

    async def check(self) -> None:
        """Raise RootGoneError if the path leads to another root now, StoreError if the storage cannot tell."""
        identity = await self._identity_now()
        if identity is not None and identity == self._identity and not self._is_gone:
            return
        forget_synced(self.store)  # the root may have been made anew, even with the same inode number
        # A file server may lag behind, so the look must prove that the object is gone.
        patient = PatientStore(self.store, Patience(ABSENCE_S, 0.0 if self._is_gone else ABSENCE_S))
        try:
            found = await read_id(patient)
        except NotFoundError:
            self._is_gone = True
            raise self.gone(f"{LOG_ROOT} is not there") from None
        except DamagedError as error:
            if identity is None or self._identity is None:
                why = f"nothing tells whether {self.store.url} is still the root of this job"
                raise UnreadableError(f"{error}; so {why}. Put it back from a copy, or start the job again") from error
            found = self.own  # it was damaged since; the directory's identity decides
        if self.own not in ("", found):
            raise self.gone("another root lies there")
        if identity is None:
            identity = await self._identity_now()  # it was out of sight for a moment
        if identity is not None and self._identity is not None and not identity.is_same_root(self._identity):
            raise self.gone("a copy of it lies in its place")
        self.own, self._identity, self._is_gone = found, identity or self._identity, False

    async def _identity_now(self) -> Identity | None:
        try:
            return await identity_of(self.store, LOG_ROOT)
        except NotFoundError:
            return None

    def gone(self, why: str) -> RootGoneError:
        """The error that the path leads to another root."""
        return RootGoneError(
            f"{self.store.url} is no longer the directory in which this job began: {why}. Was it unmounted, renamed, or "
            "another file system mounted over it? Nothing was written there; put it back, and the next save goes on by itself"
        )
