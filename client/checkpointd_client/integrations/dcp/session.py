"""State that the DCP writers of this process share for one root: the thread, the store, the start, and running attempts.

DCP opens and closes nothing: users make a writer for each save, or keep one. So a session stays when its writers have gone.

Invariants
  DCPSESSION-1  A session keeps the start that it took. If another job has begun a newer one, the session is fenced and stays
      fenced, and so does a later session at its root. Processes of the same job, and this process itself, do not fence it.
  DCPSESSION-2  By the time that a writer saves at another root, the sessions without writers and running attempts have ended.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from functools import partial

from checkpointd.commit.facts import Order
from checkpointd.config import ABSENCE_S, LoadConfig, PersistConfig
from checkpointd.errors import CheckpointdError, FencedError, NotFoundError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.layout.manifest import BRANCHES_MAX, Branches
from checkpointd.pipeline.gc.tidying import Tidier
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.store.writers import is_this_process
from checkpointd_client.lifetime import at_exit, claim_root
from checkpointd_client.loaded import left_after
from checkpointd_client.loader import call_patiently
from checkpointd_client.ranks.startup import LOOK_TIMEOUT_S, RECOVERY_TIMEOUT_S, Begun, Started, begin, end, say_unknown
from checkpointd_client.ranks.writer import WriterThread

log = logging.getLogger("checkpointd")
LEAVE_S = 10.0
"""How long a process that ends waits for the decisions on its votes."""


_sessions: dict[tuple[int, str], DcpSession] = {}
_left: dict[tuple[int, str], Begun] = {}
"""The last start of each session that has ended."""
_loaded: dict[tuple[int, str], LoadedCheckpoint] = {}
"""What this process has loaded last, by root."""
_lock = threading.Lock()


def session_of(root: str, writer: object) -> DcpSession:
    """The session of this process at `root`, for `writer`. UsageError if a Checkpointer of this process uses the root."""
    claim_root(root)()  # a DCP save may take a new start, which would fence the Checkpointer
    key = _key(root)
    with _lock:
        for idle in [one for one, session in _sessions.items() if one != key and session.is_idle]:
            session = _sessions.pop(idle)
            session.leave()
            if session.begun is not None:
                _left[idle] = session.begun
        found = _sessions.get(key)
        if found is None:
            found = _sessions[key] = DcpSession(root, _left.pop(key, None))
        found.writers.add(writer)
        return found


@dataclass(slots=True)
class LoadedCheckpoint:
    """A checkpoint that was loaded, and the branches that the saves after it leave; None before the first of them."""

    checkpoint: LoggedAttempt
    left: Branches | None = None


def take_up(root: str, checkpoint: LoggedAttempt) -> None:
    """Note that this process has loaded `checkpoint` from `root`: its saves go on from there, and from now on it may remove
    checkpoints of earlier jobs (RETENTION-6 in `commit/retention.py`).
    """
    _loaded[_key(root)] = LoadedCheckpoint(checkpoint)


def taken_from(root: str) -> LoadedCheckpoint | None:
    """What this process has loaded last from `root`."""
    return _loaded.get(_key(root))


def _key(root: str) -> tuple[int, str]:
    return os.getpid(), root if "://" in root else os.path.realpath(root)


class DcpSession:
    """One root in one process. Its methods are called on any thread but the writer's."""

    def __init__(self, root: str, before: Begun | None) -> None:
        """`before`: the last start of the session that this process had there before."""
        persist = PersistConfig()
        self.writer = WriterThread(threads=persist.encoders + persist.writes)
        self.store: Store = open_store(root)
        self.writers: weakref.WeakSet[object] = weakref.WeakSet()
        self._before = before
        self._started: Started | None = None
        self._world_size = 0
        self.first = 0
        """The first start that was taken here."""
        self._has_said, self._has_left = False, False
        self._saves: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._running: dict[Future[None], Callable[[], None]] = {}
        self._tidiers: weakref.WeakSet[Tidier] = weakref.WeakSet()
        at_exit(self.leave)

    @property
    def is_idle(self) -> bool:
        """Whether it has neither writers nor running attempts."""
        return not self.writers and all(running.done() for running in list(self._running))

    @property
    def begun(self) -> Begun | None:
        """The start that was taken last, here or by the session before."""
        return self._before if self._started is None else self._started.begun

    def next_attempt(self, tag: str, beginner: Beginner) -> tuple[Begun, AttemptId, int]:
        """On the coordinator: the start, the next attempt at `tag` in it, and the number of saves before it.

        A new start is taken at first, for another number of ranks, and if a process of this job has begun one since.
        FencedError if another job has begun one (DCPSESSION-1), RootInUseError if another job is alive when the first start is
        taken.
        """
        with self._lock:
            begun = self._current(beginner)
            self.first = self.first or begun.number
            attempt, n = AttemptId(begun.number, self._saves[tag]), self._saves.total()
            self._saves[tag] += 1
            return begun, attempt, n

    def _current(self, beginner: Beginner) -> Begun:
        before = self.begun
        if before is not None:
            newest = self.writer.call(starts.newest(self.store), LOOK_TIMEOUT_S)
            if newest > before.number:
                self.writer.call(self._check_own(before.number, newest, beginner.job), LOOK_TIMEOUT_S)
            elif newest == before.number and self._started is not None and self._world_size == beginner.world_size:
                return before
            beginner = replace(beginner, take_over=False)  # done once; a later job must not be taken over
        ended, self._started = self._started, self.writer.call(begin(self.store, beginner), RECOVERY_TIMEOUT_S)
        end(self.writer, ended)
        self._world_size = beginner.world_size
        self._saves.clear()
        return self._started.begun

    async def _check_own(self, own: int, newest: int, job: str) -> None:
        """FencedError unless start `newest`, which is newer than `own`, belongs to the same job or to this process."""
        found = await starts.read(self.store, newest)
        if not is_this_process(found.process) and not (job and found.job == job):
            raise FencedError(starts.fence_message(self.store, own, found))

    def say_unknown(self) -> None:
        """Warn once that the checkpoints from before this process stay, since it has not loaded."""
        if self._started is not None and not self._has_said:
            self._has_said = True
            say_unknown(self._started.begun, self.store.url, "dcp.load()", "CheckpointdWriter(..., afresh=True)")

    def left_after(self, taken: LoadedCheckpoint | None, begins: Order, timeout_s: float) -> Branches:
        """On the coordinator: the branches that a save of the order `begins` leaves, which goes on from what was `taken`."""
        if taken is None:
            return ()
        if taken.left is None:
            look = partial(call_patiently, self.writer, LoadConfig(retry_s=timeout_s / 2, absence_s=ABSENCE_S))
            _, left = left_after(self.store, taken.checkpoint.prefix, begins, look)
            taken.left = left[-BRANCHES_MAX:]
        return taken.left

    def holds(self, tag: str) -> bool:
        """Whether `tag` is a checkpoint."""
        try:
            self.writer.call(root_view.find(self.store, tag), LOOK_TIMEOUT_S)
        except NotFoundError:
            return False
        return True

    def follow(self, running: Future[None], leave: Callable[[], None], tidier: Tidier) -> None:
        """Remember a running attempt until it ends; call `leave` if the process ends first. `tidier` removes older attempts."""
        with self._lock:
            self._running[running] = leave
            self._tidiers.add(tidier)
        running.add_done_callback(lambda done: self._running.pop(done, None))

    def leave(self) -> None:
        """End the session: abort the unfinished attempts that it coordinates, and wait briefly for the others. It may be called
        again.
        """
        if self._has_left:
            return
        self._has_left = True
        running = dict(self._running)
        for leave in running.values():
            leave()
        wait(running, LEAVE_S)
        try:
            for tidier in list(self._tidiers):
                self.writer.call(tidier.rest(), LEAVE_S)
        except CheckpointdError as error:
            log.warning(
                "some replaced checkpoints at %s are still there (%s); the next save removes them", self.store.url, error
            )
        end(self.writer, self._started)
        try:
            self.writer.call(self.store.close(), LEAVE_S)
        except CheckpointdError as error:
            log.error("closing %s: %s", self.store.url, error)
        self.writer.close()
