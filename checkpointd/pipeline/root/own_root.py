"""Checks that the root's path still leads to the directory in which this job began.

Invariant
  OWNROOT-1  A writer that knows its job's start puts a vote, an outcome, or an attempt's intent or close only if it has just
      seen the record of that start, with the job's nonce, in the same directory in which it saw the record first.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from checkpointd.config import ABSENCE_S
from checkpointd.errors import CheckpointdError, DamagedError, FencedError, LinkError, NotFoundError, RootGoneError, StoreError
from checkpointd.layout.keys import start_key
from checkpointd.pipeline.root import starts
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store
from checkpointd.store.identity import Identity, forget_synced, identity_of
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.system_errors import lasts

log = logging.getLogger("checkpointd")

ANSWER_S = 4.0
"""How long a store may take when a job begins. This is enough to prove that a record is missing (ABSENCE_S), and short
enough for a trainer that waits for its sidecar. The first save looks again."""


@dataclass(slots=True)
class _Known:
    """A start of this job, with the `identity` of its root and record once they were seen."""

    nonce: str
    identity: Identity | None = None
    is_gone: bool = False
    """Whether the last look proved that the record is gone. Then the next look needs no proof to say so again."""


class _Elsewhere(Exception):
    """The path leads to another directory; the message says why."""


class OwnRoot:
    """The starts that one rank's job has taken at the root, as its writer knows them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, _Known] = {}

    async def begun(self, start: int, nonce: str) -> None:
        """Note that the job has taken `start` at this root. Raises nothing, since the first save checks it again."""
        with suppress(CheckpointdError):
            await self.confirm(start, nonce)

    def expect(self, start: int, nonce: str) -> None:
        """Note that an earlier process of this job took `start` at this root. The next check looks for it."""
        self._known[start] = _Known(nonce)

    async def confirm(self, start: int, nonce: str) -> StoreError | None:
        """Check another process's word that the job has taken `start` at this root.

        Raises RootGoneError if the store contradicts it, and LinkError or StoreError if the root may not be read here. Returns
        the error of a storage that fails for now: the first save looks again.
        """
        # Somebody may have removed the root of the last job, and this job made a new one, perhaps with the same inode number.
        forget_synced(self._store)
        self._known[start] = _Known(nonce)
        try:
            await answered(self._look(start, self._known[start]), ANSWER_S)
        except _Elsewhere as error:
            raise RootGoneError(str(error)) from error
        except StoreError as error:
            if isinstance(error, LinkError) or lasts(error):
                raise
            return error
        return None

    async def check(self, start: int) -> None:
        """Raise RootGoneError if the path leads to another directory (OWNROOT-1), StoreError if the storage cannot tell, and
        FencedError if the record of the start is gone because there are many newer ones.

        If the writer was not told of the start, it trusts the record that it finds. A start without a record is not checked.
        """
        try:
            known = self._known.get(start)
            if known is not None:
                await self._look(start, known)
                return
            with suppress(NotFoundError, DamagedError):
                self._known[start] = _Known((await starts.read(self._store, start)).nonce)
                await self._look(start, self._known[start])
        except _Elsewhere as error:
            raise RootGoneError(
                f"{self._store.url} is no longer the directory in which this job began: {error}. Was it unmounted, renamed, or "
                "another file system mounted over it? Nothing was written there; put it back, and the next save goes on by "
                "itself"
            ) from error

    async def _look(self, start: int, known: _Known) -> None:
        # A file server may lag behind, so the look must prove that the record is gone.
        patient = PatientStore(self._store, Patience(ABSENCE_S, 0.0 if known.is_gone else ABSENCE_S))
        key = start_key(start)
        try:
            found = (await starts.read(patient, start)).nonce
        except NotFoundError:
            if starts.is_over(
                start, current := await starts.newest(self._store)
            ):  # a newer start may have removed it (START-2)
                raise FencedError(await starts.fence_message(self._store, start, current)) from None
            known.is_gone = True
            raise _Elsewhere(f"the record {key} of this job is not there") from None
        except DamagedError:
            if known.identity is None:
                raise
            found = known.nonce  # the record was damaged since; the directory's identity decides
        if found != known.nonce:
            raise _Elsewhere(f"start {start} there is another job's")
        try:
            identity = await identity_of(self._store, key)
        except NotFoundError:
            raise _Elsewhere(f"{key} has just gone") from None
        if identity is not None and known.identity is not None and not identity.is_same_root(known.identity):
            raise _Elsewhere("a copy of it lies in its place")
        known.identity, known.is_gone = identity, False
