"""What a link to the sidecar keeps: its saves, its questions, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from checkpointd.commit.machine import FINAL, Phase
from checkpointd.daemon import wire
from checkpointd.daemon.channel import Received
from checkpointd.errors import ERRORS, AbortedError, CheckpointdError, SidecarError
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.shard import Progress
from checkpointd_client.running import Job


class LinkLost(SidecarError):
    """The connection to the sidecar ended, or the sidecar does not answer any more."""


class NoAnswer(LinkLost):
    """Somebody holds the socket, and says nothing: asking costs the whole patience each time."""


class Asked:
    """A question to the daemon. One that `closes_handing` follows what is answered only where it is refused."""

    def __init__(self, kind: type, *, closes_handing: bool = False) -> None:
        self.kind, self.closes_handing = kind, closes_handing
        self.answer: asyncio.Future[Received] = asyncio.get_running_loop().create_future()

    def refuse(self, error: CheckpointdError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # whoever asked hears it; they may have given up


class Track:
    """One save on a link: what the daemon said of it so far."""

    def __init__(self, job: Job, on_phase: Callable[[Phase, CheckpointdError | None], None]) -> None:
        self.job = job
        self.votes_missing: tuple[int, ...] | None = None
        self.known = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_phase = on_phase

    def entered(self, message: wire.Phase) -> None:
        phase = Phase(message.phase)
        self.known = True
        if phase in FINAL and not self.ended.done():
            self.ended.set_result(None)
        self._on_phase(phase, error_of(message.error, message.ranks))

    def moved(self, message: wire.Progress, progress: Progress) -> None:
        progress.mirror(
            raw_total=message.raw_total,
            raw_done=message.raw_done,
            raw_kept=message.raw_kept,
            stored=message.stored,
            writing_s=message.writing_s,
        )
        progress.stale = message.stale
        self.votes_missing = message.votes_missing

    def lost(self, error: LinkLost) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # whoever waits hears it; nobody may


def error_of(report: ErrorReport | None, ranks: tuple[int, ...]) -> CheckpointdError | None:
    """The error that the daemon reported, as its class."""
    if report is None:
        return None
    kind = ERRORS.get(report.code, CheckpointdError)
    return kind(report.message, ranks=ranks) if issubclass(kind, AbortedError) else kind(report.message)
