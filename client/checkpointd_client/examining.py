"""Finds the damage of a checkpoint of files on one rank. On the way, a taker may load some of the verified files.

Invariants
  EXAMINE-1  Every byte that the given ranks stored is verified, and read once, whether a taker loads its file or not.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, UnreadableError
from checkpointd.layout.indexes import Index
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.pipeline.read.chunks import read_chunks
from checkpointd.pipeline.read.plan import ChunkRead
from checkpointd.pipeline.read.verify import checked_index, verify
from checkpointd.pipeline.root.tag_directories import unseen_of
from checkpointd.store.base import Capabilities, Store
from checkpointd.store.passing import PassingStore
from checkpointd.store.patient import Patience, PatientStore
from checkpointd_client.loader import call_patiently
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.verified import StoredFile, VerifiedFile, stored_files


class Taker(Protocol):
    """Loads files while they are verified."""

    @property
    def others(self) -> Sequence[int]:
        """More ranks of which the taker may want files. Their other files are not verified."""
        ...

    def wants(self, rank: int, name: str) -> bool:
        """Whether to load the file `name` of `rank`."""
        ...

    def take(self, file: VerifiedFile) -> None:
        """Load the file. Throw the result away if `file.damage` or `file.error` is set afterwards. Raises nothing."""
        ...


class Nobody:
    """Takes no file."""

    others: Sequence[int] = ()

    def wants(self, rank: int, name: str) -> bool:
        """No."""
        del rank, name
        return False

    def take(self, file: VerifiedFile) -> None:
        """Never called."""


class _WithoutGaps(PassingStore):
    """A store in which nothing is read that is not asked for, since it is asked for later (EXAMINE-1)."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, gap_bytes=0)


@dataclass(frozen=True, slots=True)
class Examination:
    """Examines one checkpoint. `unseen` says why its files are not shown, or None if they are."""

    store: Store
    writer: WriterThread
    config: LoadConfig
    timeout_s: float
    checkpoint: LoggedAttempt
    unseen: Callable[[Store, CommitRecord], Coroutine[Any, Any, str | None]] = unseen_of

    def damage(self, ranks: Iterable[int], taker: Taker) -> tuple[str, ...]:
        """The damage to the files that `ranks` stored or `taker` loads, and files that are not shown. Raises UnreadableError if
        a read fails for now.
        """
        commit, taken = self.checkpoint.commit, list[StoredFile]()
        unseen = call_patiently(
            self.writer, self.config, lambda patience: self.unseen(PatientStore(self.store, patience), commit)
        )
        if unseen is not None:
            return (unseen,)

        def left(index: Index) -> set[str]:
            files = [file for file in stored_files(self.checkpoint.prefix, index) if taker.wants(index.rank, file.name)]
            taken.extend(files)
            return {fqn for file in files for fqn in file.fqns}

        patience_s = self.timeout_s + self.config.retry_s + self.config.absence_s
        ranks = list(ranks)
        found = self.writer.call_with_progress_timeout(
            lambda on_bytes: verify(self.store, self.checkpoint, self.config, on_bytes, ranks=ranks, left=left), patience_s
        )
        if found.unreadable and not found.damage:
            raise UnreadableError(found.unreadable[0].message)
        damage = [one.message for one in found.damage]
        try:
            for rank in taker.others:
                left(self.writer.call(checked_index(self._patient(), self.checkpoint, rank), patience_s))
        except DamagedError as error:
            damage.append(str(error))
        for file in taken:
            damage += [str(error) for error in self._taken(file, taker, patience_s)]
        return tuple(damage)

    def _taken(self, file: StoredFile, taker: Taker, patience_s: float) -> list[DamagedError]:
        store = _WithoutGaps(self._patient())

        def read(wanted: Sequence[ChunkRead]) -> list[DamagedError]:
            return self.writer.call_with_progress_timeout(
                lambda on_bytes: read_chunks(store, wanted, self.config, on_bytes), patience_s
            )

        opened = VerifiedFile(file, read)
        if not opened.damage:
            taker.take(opened)
        return opened.finish()

    def _patient(self) -> PatientStore:
        return PatientStore(self.store, Patience(self.config.retry_s, self.config.absence_s))
