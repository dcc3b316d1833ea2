"""Reads a checkpoint of Lightning's that checkpointd has committed: the stored file, whose bytes are verified on the way.

Invariants
  READFILE-1  Every byte of the file is verified before its content is returned. A damaged checkpoint raises DamagedError. No
      other one is loaded in its place, since the caller has named it.
  READFILE-2  If several processes read the same path, all get the newest commit there, whether it is shown already or not.
  READFILE-3  A file that somebody else has written to the path since is theirs, and is not read here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointd.commands import command
from checkpointd.config import ABSENCE_S, LoadConfig, PersistConfig
from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd.layout.keys import shown_key
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import Shown, decode
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.tag_directories import files_of
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.showing import plain_files_of
from checkpointd_client.examining import Examination
from checkpointd_client.integrations.lightning.places import CheckpointPlace
from checkpointd_client.loader import call_patiently
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.verified import VerifiedFile

log = logging.getLogger("checkpointd")


@dataclass(slots=True)
class _Taken:
    """Takes the one file of a checkpoint. `load` makes the content of it."""

    load: Callable[[VerifiedFile], Any]
    others: Sequence[int] = ()
    content: Any = None
    error: Exception | None = None

    def wants(self, rank: int, name: str) -> bool:
        """Each file is wanted: there is one."""
        del rank, name
        return True

    def take(self, file: VerifiedFile) -> None:
        """Keep the content, or the error of whoever loads it."""
        try:
            self.content = self.load(file)
        except Exception as error:  # the reader of a pickle may raise anything
            self.error = error


async def _sound(store: Store, commit: CommitRecord) -> str | None:
    """No word about what the directory shows: the stored file is read."""
    del store, commit
    return None


def is_sharded(place: CheckpointPlace) -> bool:
    """Whether the commit that is shown at `place` is a state, which several ranks may have saved, and not a file."""
    key = shown_key(place.at)
    return not decode(Path(place.root, key).read_bytes(), Shown, key).files


def stored_content(place: CheckpointPlace, load: Callable[[VerifiedFile], Any], timeout_s: float) -> tuple[bool, Any]:
    """Whether a commit is at `place`, and what `load` makes of its file. `timeout_s`: for a storage that does not answer.

    Raises DamagedError, UnreadableError, or whatever `load` raises for a file that is whole.
    """
    writer = WriterThread(threads=PersistConfig().encoders)
    try:
        store = open_store(place.root, read_only=True)
        try:
            checkpoint = _found(store, writer, place, timeout_s)
            if checkpoint is None:
                return False, None
            taken = _Taken(load)
            config = LoadConfig(retry_s=timeout_s, absence_s=ABSENCE_S)
            damage = Examination(store, writer, config, timeout_s, checkpoint, _sound).damage([0], taken)
        finally:
            writer.call(store.close(), timeout_s)
    finally:
        writer.close()
    if damage:
        raise DamagedError(
            f"{place.path} is damaged: {'; '.join(damage)}. {command('list', place.root)} lists the others: pass the path "
            "of one as ckpt_path"
        )
    if taken.error is not None:
        raise taken.error
    return True, taken.content


def _found(store: Store, writer: WriterThread, place: CheckpointPlace, timeout_s: float) -> LoggedAttempt | None:
    """The newest commit at `place`; None if there is none, or if somebody else has written there since (READFILE-3)."""

    async def look() -> LoggedAttempt | None:
        try:
            record = decode(await store.get(shown_key(place.at)), Shown, shown_key(place.at))
            if not record.files:
                raise UsageError(
                    f"{place.path} was saved in shards by CheckpointdModelParallelStrategy, which loads it on any number of "
                    f"ranks. For other programs, {command('consolidate', place.root)} writes one file"
                )
            found = await root_view.find(store, record.tag)
        except NotFoundError:
            return None
        plain = plain_files_of(store)
        if plain is None or found.prefix != record.prefix:
            return found
        changed = await plain.changed(place.at, await files_of(store, found.commit))
        if changed:
            log.warning("%s was written after checkpointd had committed it: it is loaded as it is, unverified", place.path)
        return None if changed else found

    return call_patiently(writer, LoadConfig(retry_s=timeout_s, absence_s=0.0), lambda _: look())
