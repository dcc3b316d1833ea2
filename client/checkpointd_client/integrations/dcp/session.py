"""What the DCP writers of this process share for one root: the thread, the store, the epoch, and attempts that still run.

DCP opens and closes nothing: it makes a writer for each save, or keeps one. So the session stays until the process ends.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from concurrent.futures import Future, wait
from typing import Protocol

from checkpointd.config import CommitConfig, PersistConfig
from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import AttemptId
from checkpointd.pipeline import epochs
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd_client.lifetime import at_exit, claim_root
from checkpointd_client.start import LOOK_TIMEOUT_S, RECOVERY_TIMEOUT_S, Begun, begin
from checkpointd_client.writer import Writer

log = logging.getLogger("checkpointd")
LEAVE_S = 10.0
"""How long a process that ends waits for the outcome of what it has voted for."""


class Follower(Protocol):
    """An attempt that still runs."""

    def leave(self) -> None:
        """The process ends."""
        ...


_sessions: dict[tuple[int, str], Session] = {}
_lock = threading.Lock()


def session_of(root: str) -> Session:
    """The session of this process at `root`. UsageError where a Checkpointer of this process uses it."""
    claim_root(root)()  # a DCP save takes a new epoch, which would fence the Checkpointer
    key = os.getpid(), root if "://" in root else os.path.realpath(root)
    with _lock:
        session = _sessions.get(key)
        if session is None:
            session = _sessions[key] = Session(root)
        return session


class Session:
    """One root in one process. Its methods are called on any thread but the writer's."""

    def __init__(self, root: str) -> None:
        persist = PersistConfig()
        self.writer = Writer(threads=persist.encoders + persist.writes)
        self.store: Store = open_store(root)
        self._begun: Begun | None = None
        self._world_size = 0
        self._saves: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._running: dict[Future[None], Follower] = {}
        at_exit(self.leave)

    def next_attempt(self, tag: str, world_size: int, commit: CommitConfig) -> tuple[Begun, AttemptId, int]:
        """On the coordinator: the epoch, the next attempt at `tag` in it, and the number of saves before it.

        A new epoch is taken for another number of ranks, and where another job has begun one since.
        """
        with self._lock:
            begun = self._begun
            if begun is None or self._world_size != world_size or self._newest() != begun.number:
                begun = self.writer.call(begin(self.store, world_size, commit), RECOVERY_TIMEOUT_S)
                self._begun, self._world_size = begun, world_size
                self._saves.clear()
            attempt, n = AttemptId(begun.number, self._saves[tag]), self._saves.total()
            self._saves[tag] += 1
            return begun, attempt, n

    def _newest(self) -> int:
        return self.writer.call(epochs.newest(self.store), LOOK_TIMEOUT_S)

    def follow(self, attempt: Follower, running: Future[None]) -> None:
        """Remember an attempt until it ends."""
        with self._lock:
            self._running[running] = attempt
        running.add_done_callback(lambda done: self._running.pop(done, None))

    def leave(self) -> None:
        """The process ends: attempts that it leads and never finished are given up, others are waited for a little."""
        running = dict(self._running)
        for attempt in running.values():
            attempt.leave()
        wait(running, LEAVE_S)
        try:
            self.writer.call(self.store.close(), LEAVE_S)
        except CheckpointdError as error:
            log.error("closing %s: %s", self.store.url, error)
        self.writer.close()
