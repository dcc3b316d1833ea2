"""Checks that the root's path still leads to the directory in which this job began.

Invariant
  OWNROOT-1  A writer that was told its job's epoch puts no vote and no outcome unless it has just seen the record of that
      epoch, with the job's nonce, in the directory in which it has seen it first.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass

from checkpointd.config import ABSENCE_S
from checkpointd.errors import CheckpointdError, DamagedError, LinkError, NotFoundError, RootGoneError, StoreError
from checkpointd.layout.keys import epoch_key
from checkpointd.pipeline.root import epochs
from checkpointd.pipeline.workers import answered
from checkpointd.store.base import Store
from checkpointd.store.identity import Identity, forget_synced, identity_of
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.store.posix.failures import is_forbidden

log = logging.getLogger("checkpointd")

ANSWER_S = 4.0
"""How long a store is waited for when an epoch begins: long enough to prove that a record is not there (ABSENCE_S), and short
enough for a trainer that waits for its sidecar's answer. The first save looks anyway."""


@dataclass(slots=True)
class _Known:
    """An epoch of this job; `identity` of its root and record, once they were seen."""

    nonce: str
    identity: Identity | None = None
    is_gone: bool = False
    """Whether a look proved that it is gone, and none has found it since: then the next one takes its word sooner."""


class _Elsewhere(Exception):
    """The path leads elsewhere; it says why."""


class OwnRoot:
    """What one rank's writer knows of the epochs that its job has begun at the root."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, _Known] = {}

    async def begun(self, epoch: int, nonce: str) -> None:
        """The job has begun `epoch` at this root. Raises nothing: what cannot be seen now, the first save looks for."""
        with suppress(CheckpointdError):
            await self.confirm(epoch, nonce)

    async def confirm(self, epoch: int, nonce: str) -> StoreError | None:
        """The same from somebody else's word: raises where the store shows that it is not so, or may not be read here.

        Returns the error of a storage that cannot tell now, and may soon: the first save looks again.
        """
        # Since the last job somebody may have removed the root, and this one made it again; its inode may have the same number.
        forget_synced(self._store)
        self._known[epoch] = _Known(nonce)
        try:
            await answered(self._look(epoch, self._known[epoch]), ANSWER_S)
        except _Elsewhere as error:
            raise RootGoneError(str(error)) from error
        except StoreError as error:
            if isinstance(error, LinkError) or is_forbidden(error):
                raise
            return error
        return None

    async def check(self, epoch: int) -> None:
        """Raise RootGoneError where the path leads elsewhere (OWNROOT-1), StoreError where the storage does not tell. An epoch
        that it was not told of is taken as it is found; one that it never saw is not checked.
        """
        try:
            known = self._known.get(epoch)
            if known is not None:
                await self._look(epoch, known)
                return
            with suppress(NotFoundError, DamagedError):
                self._known[epoch] = _Known((await epochs.read(self._store, epoch)).nonce)
                await self._look(epoch, self._known[epoch])
        except _Elsewhere as error:
            raise RootGoneError(
                f"{self._store.url} is no longer the directory in which this job began: {error}. Was it unmounted, renamed, or "
                "another file system mounted over it? Nothing was written there; put it back, and the next save goes on by "
                "itself"
            ) from error

    async def _look(self, epoch: int, known: _Known) -> None:
        # A file server may lag behind: that the record is gone must be proved.
        patient = PatientStore(self._store, Patience(ABSENCE_S, 0.0 if known.is_gone else ABSENCE_S))
        key = epoch_key(epoch)
        try:
            found = (await epochs.read(patient, epoch)).nonce
        except NotFoundError:
            known.is_gone = True
            raise _Elsewhere(f"{key}, which says that it began there, is not there") from None
        except DamagedError:
            if known.identity is None:
                raise
            found = known.nonce  # its bytes have gone bad; the directory tells
        if found != known.nonce:
            raise _Elsewhere(f"another job has begun epoch {epoch} there")
        try:
            identity = await identity_of(self._store, key)
        except NotFoundError:
            raise _Elsewhere(f"{key} has just gone") from None
        if identity is not None and known.identity is not None and not identity.is_same_root(known.identity):
            raise _Elsewhere("a copy of it lies in its place")
        known.identity, known.is_gone = identity, False
