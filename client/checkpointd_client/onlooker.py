"""Loads on all ranks from a root where this job does not begin, because another job uses it or it is not writable.

Invariants
  ONLOOKER-1  An Onlooker writes, locks and announces nothing at the root: it has no start and no lease, and never disturbs a
      job there.
  ONLOOKER-2  The ranks agree as with a Checkpointer: all load the same checkpoint, or all raise the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from types import TracebackType
from typing import Self

from checkpointd.config import ABSENCE_S, PINNED_BYTES, LoadConfig, PersistConfig
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.candidates import listed
from checkpointd.pipeline.root.tag_directories import abandoned, unlike
from checkpointd.store import open_store
from checkpointd_client.examining import Examination, Nobody, Taker
from checkpointd_client.loaded import Loaded
from checkpointd_client.loader import LOOK_S, Loader, call_patiently
from checkpointd_client.ranks.board import find_ranks, open_board
from checkpointd_client.ranks.load_rounds import LoadRounds
from checkpointd_client.ranks.rendezvous import Meetings
from checkpointd_client.ranks.writer import WriterThread
from checkpointd_client.restore.plan import LoadOptions
from checkpointd_client.restore.target_chooser import TargetChooser

log = logging.getLogger("checkpointd")


class Onlooker:
    """Loads as a Checkpointer does. Make it on every rank, with the same new `nonce`. `timeout_s`: as `commit_timeout_s`."""

    def __init__(
        self,
        root: str,
        nonce: str,
        *,
        timeout_s: float,
        absence_s: float = ABSENCE_S,
        pickle_client_state: bool = False,
        pinned_bytes: int = PINNED_BYTES,
    ) -> None:
        self._ranks = find_ranks()
        self._load = LoadConfig(retry_s=timeout_s, absence_s=absence_s, pinned_bytes=pinned_bytes)
        self._glance = LoadConfig(retry_s=timeout_s / 2, absence_s=absence_s)
        """For reads during a meeting, where the other ranks wait no longer than `timeout_s`."""
        self._timeout_s, self._pickles = timeout_s, pickle_client_state
        board = open_board(self._ranks, f"looking/{nonce}")
        self._meetings = Meetings(board, self._ranks, timeout_s)
        self._load_rounds = LoadRounds(board, self._ranks, timeout_s, timeout_s + absence_s)
        self._store = open_store(root, read_only=True)
        self._writer = WriterThread(threads=PersistConfig().encoders)

    def meet(self, said: str, doing: str) -> dict[int, str]:
        """Meet when all ranks are `doing` the same; returns the message of each. DeadlineError names the missing ranks."""
        return self._meetings.meet(said, doing)

    def load(self, state: TargetChooser, tag: str | None = None, *, cast: bool = False) -> Loaded | None:
        """Load the newest whole checkpoint, or `tag`. Raises as Checkpointer.load does."""
        loader = Loader(
            store=self._store,
            writer=self._writer,
            ranks=self._ranks,
            config=self._load,
            load_round=self._load_rounds.begin(),
            timeout_s=self._timeout_s,
            state=state,
            options=LoadOptions(cast=cast, unpickle=self._pickles),
        )
        return loader.load(tag, fallback=True)

    def take_up(self) -> None:
        """Do nothing: this job removes no checkpoint here."""

    def go_on_from(self, checkpoint: LoggedAttempt) -> None:
        """Do nothing: this job does not save here."""

    def pass_over(self, prefix: str, why: str) -> None:
        """Only write a line to the log: an Onlooker puts no record at the root."""
        log.info("no record is put at %s that %s was passed over: %s", self._store.url, prefix, why)

    def removed(self) -> frozenset[str]:
        """The checkpoints (`<tag>/<attempt>`) whose tag directory somebody has removed, as `Core.removed`."""
        return frozenset(self._writer.call(abandoned(self._store), LOOK_S))

    def damage(self, checkpoint: LoggedAttempt, ranks: Iterable[int], taker: Taker | None = None) -> tuple[str, ...]:
        """The damage to the files that `ranks` stored, and files that are not shown, as `Core.damage` lists them."""
        unseen = partial(unlike, absence_s=self._load.absence_s)
        examination = Examination(self._store, self._writer, self._glance, self._timeout_s, checkpoint, unseen)
        damage = examination.damage(ranks, taker or Nobody())
        if damage and not self._writer.call(root_view.is_checkpoint(self._store, checkpoint.prefix), LOOK_S):
            return (f"{checkpoint.prefix} was removed while it was read, by the job that saves there or by hand",)
        return damage

    def close(self) -> None:
        """Release threads and memory."""
        try:
            self._writer.call(self._store.close(), self._timeout_s)
        finally:
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def checkpoints(self) -> list[LoggedAttempt]:
        """All checkpoints, newest first. UnreadableError if failed reads hide which one is the newest."""
        return call_patiently(self._writer, self._glance, lambda patience: listed(self._store, patience))
