"""The saves of this process: those in flight, and the last ones that ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from checkpointd.commit.decide import awaited_words
from checkpointd.commit.machine import FINAL, Phase
from checkpointd.errors import SupersededError
from checkpointd.layout.manifest import ErrorReport
from checkpointd_client.saves.handle import OwnHandle
from checkpointd_client.saves.status import AttemptStatus

log = logging.getLogger("checkpointd")

KEPT = 64


class Voting(Protocol):
    """Knows which votes of an attempt are missing: the attempt itself, or the link to the sidecar that runs it."""

    @property
    def votes_missing(self) -> tuple[int, ...] | None: ...


@dataclass(slots=True)
class SaveRecord:
    """One save: its handle and, while a writer runs the attempt, the missing votes."""

    handle: OwnHandle
    voting: Voting | None = None
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.handle.missing = self.missing

    def missing(self) -> str:
        """Why the save has not ended, in words."""
        handle, voting = self.handle, self.voting
        votes = voting.votes_missing if voting else None
        match handle.phase:
            case "staging":
                why = "its snapshot is not whole"
            case "staged" | "persisting":
                why = f"{handle.bytes_done} of {handle.bytes_total} bytes are on the disk"
            case "spooled":
                why = "it is durable in the spool, and waits for its upload"
            case "uploading":
                why = f"{handle.bytes_uploaded} of {handle.bytes_to_upload} bytes are uploaded"
            case _:
                why = awaited_words(votes)
        return f"{handle.tag} ({handle.attempt}) is {handle.phase}: {why}{handle.trouble_words}"

    def status(self) -> AttemptStatus:
        handle, error = self.handle, self.handle.peek()
        return AttemptStatus(
            tag=handle.tag,
            attempt=handle.attempt,
            step=handle.step,
            phase=handle.phase,
            progress=handle.progress,
            bytes_total=handle.bytes_total,
            bytes_done=handle.bytes_done,
            bytes_stored=handle.bytes_stored,
            speed_bps=handle.speed_bps,
            eta_s=handle.eta_s,
            age_s=time.monotonic() - self.began,
            waited_s=handle.timings.waited_s,
            votes_missing=self.voting.votes_missing if self.voting else None,
            error=None if error is None else ErrorReport.of(error, handle.phase),
            no_progress=handle.no_progress,
            seconds=handle.seconds,
            pace=handle.pace.share,
            rested_s=handle.pace.rested_s,
            full_speed=handle.pace.reason,
            bytes_to_upload=handle.bytes_to_upload,
            bytes_uploaded=handle.bytes_uploaded,
        )


class SaveHistory:
    """Thread-safe record of the saves, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: list[SaveRecord] = []
        self._ended: deque[SaveRecord] = deque(maxlen=KEPT)
        self.committed = 0
        self.failed = 0
        self.superseded = 0
        """Saves that were dropped from the spool for newer ones."""
        self.waited_s = 0.0
        """How long calls of save() waited because two earlier saves were not written yet, added up."""
        self.last_failed: OwnHandle | None = None
        """The newest save that ended and was not skipped, if it failed. Saves may end in another order than they began."""
        self._newest_began = 0.0
        self._newest_committed: float | None = None
        """When the newest save began that has committed."""

    def add(self, save: SaveRecord) -> None:
        with self._lock:
            self._live.append(save)

    def waited(self, handle: OwnHandle, seconds: float) -> None:
        """Count that the call of save() for `handle` waited so long for earlier saves."""
        handle.timings.waited_s += seconds
        self.waited_s += seconds

    def end(self, save: SaveRecord, phase: Phase) -> None:
        """Count `save` as ended."""
        assert phase in FINAL
        with self._lock:
            self._live.remove(save)
            self._ended.append(save)
            self.committed += phase is Phase.COMMITTED
            is_superseded = isinstance(save.handle.peek(), SupersededError)
            self.superseded += is_superseded
            self.failed += phase in (Phase.ABORTED, Phase.FAILED) and not is_superseded
            if phase is Phase.COMMITTED:
                self._newest_committed = max(save.began, self._newest_committed or save.began)
            if save.began >= self._newest_began and phase is not Phase.SKIPPED:
                self._newest_began = save.began
                self.last_failed = None if phase is Phase.COMMITTED or is_superseded else save.handle

    def leave(self, save: SaveRecord) -> None:
        """This process hears no more of `save`, which is in the spool."""
        with self._lock:
            if save in self._live:
                self._live.remove(save)
                self._ended.append(save)

    def newest_kept(self) -> float | None:
        """When the newest save began that is in flight or has committed, by time.monotonic(); None if there is none."""
        with self._lock:
            return max([save.began for save in self._live], default=self._newest_committed)

    def live(self) -> list[SaveRecord]:
        with self._lock:
            return list(self._live)

    def in_flight(self) -> list[OwnHandle]:
        with self._lock:
            return [save.handle for save in self._live]

    def statuses(self) -> tuple[AttemptStatus, ...]:
        with self._lock:
            saves = [*self._ended, *self._live]
        return tuple(save.status() for save in saves)
