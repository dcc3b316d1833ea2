"""What `Checkpointer.status()` and `list()` return: plain typed data, cheap to make at every step, serialisable by msgspec."""

from __future__ import annotations

from datetime import datetime

import msgspec

from checkpointd.layout.manifest import ErrorReport
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.read.readback import ReadBackStatus
from checkpointd.pipeline.root.catalog import Checkpoint


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in the store, as `Checkpointer.list()` gives it."""

    tag: str
    step: int
    time: datetime | None
    """When it was committed, by the clock of the rank that did; None if that was not recorded."""
    nbytes: int | None
    """Bytes of its tensors before compression; None if that was not recorded."""
    metrics: dict[str, float]
    """What save() was given on rank 0."""
    verified: bool
    """Whether it was read back whole since it was written."""

    @staticmethod
    def of(checkpoint: Checkpoint) -> CheckpointInfo:
        """The record of a checkpoint that was found in the store."""
        outcome = checkpoint.outcome
        try:
            time = datetime.fromisoformat(outcome.writer.time)
        except ValueError:
            time = None
        return CheckpointInfo(
            tag=checkpoint.tag,
            step=outcome.step,
            time=time,
            nbytes=outcome.cost.raw_bytes if outcome.cost else None,
            metrics=dict(outcome.metrics),
            verified=checkpoint.read_back == "whole",
        )


class AttemptStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One save of this rank. Bytes and seconds; `votes_missing` is known on the coordinator (rank 0) only, else None."""

    tag: str
    attempt: str
    step: int
    phase: str
    progress: float
    bytes_total: int
    bytes_done: int
    bytes_stored: int
    speed_bps: float | None
    """Bytes persisted per second; None before the first."""
    eta_s: float | None
    """Until this rank's shard is persisted, at that speed; None where nothing can be said."""
    age_s: float
    votes_missing: tuple[int, ...] | None = None
    error: ErrorReport | None = None
    no_progress: bool = False
    """It was committed, and nothing that is trained had changed since the checkpoint before, though the step moved on."""
    seconds: PhaseSeconds = PhaseSeconds()
    """How long it took for what; a sidecar tells it with the vote."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's view of its root: saves in flight and the last ones that ended, newest last."""

    root: str
    epoch: int
    rank: int
    world_size: int
    latest: str | None
    in_flight: int
    saves_committed: int
    saves_failed: int
    attempts: tuple[AttemptStatus, ...]
    sidecar: str | None = None
    """The socket of the sidecar that this rank uses; None where its own process persists."""
    sidecar_connected: bool = False
    read_back: ReadBackStatus
    """What this process has read back. What a sidecar has stands in its own status."""

    def to_json(self) -> str:
        """The same as JSON."""
        return msgspec.json.encode(self).decode()
