"""The results of `Checkpointer.status()` and `list()`: plain data that msgspec can serialise, cheap enough for every step."""

from __future__ import annotations

import msgspec

from checkpointd.export.progress import ExportProgress
from checkpointd.layout.log_records import LoggedAttempt, ReadBackState
from checkpointd.layout.manifest import ErrorReport
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.identity import seconds_of
from checkpointd.pipeline.pace import PaceReason
from checkpointd.store.requests import Requests


class CheckpointInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint in the store, as `Checkpointer.list()` and `list_checkpoints()` give it."""

    tag: str
    step: int
    committed_at: float | None
    """When it was committed, in seconds since 1970, by the clock of the machine that committed it; None if that was not
    recorded. `datetime.fromtimestamp(committed_at, timezone.utc)` makes a datetime of it.
    """
    nbytes: int | None
    """Bytes of its tensors before compression; None if that was not recorded."""
    metrics: dict[str, float]
    """The metrics that rank 0 passed to save()."""
    read_back: ReadBackState
    """Whether it was read back since it was written, and the result: "no", "whole" or "damaged"."""
    problem: str = ""
    """Why it cannot be loaded, if that is known: it was found damaged, or objects that it needs are gone."""

    @property
    def whole(self) -> bool:
        """Whether nothing is known against it."""
        return not self.problem


def info_of(checkpoint: LoggedAttempt) -> CheckpointInfo:
    """Describe a checkpoint of the store."""
    commit = checkpoint.commit
    return CheckpointInfo(
        tag=checkpoint.tag,
        step=commit.step,
        committed_at=seconds_of(commit.writer.time),
        nbytes=commit.cost.raw_bytes if commit.cost else None,
        metrics=dict(commit.metrics),
        read_back=checkpoint.read_back,
        problem="it was read back, and is damaged" if checkpoint.read_back == "damaged" else "",
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
    """Seconds until this rank's shard is persisted, at that speed; None while that is unknown."""
    age_s: float
    waited_s: float = 0.0
    """How long its call of save() waited because two earlier saves were not written yet."""
    votes_missing: tuple[int, ...] | None = None
    error: ErrorReport | None = None
    no_progress: bool = False
    """Whether it was committed although no trained tensor had changed since the checkpoint before, while the step moved on."""
    seconds: PhaseSeconds = PhaseSeconds()
    """The seconds that each phase took. A sidecar reports them with the vote."""
    pace: float = 1.0
    """The part of the time in which it works, for `max_overhead`."""
    rested_s: float = 0.0
    """How long its workers have rested for that, added up."""
    full_speed: PaceReason = ""
    """Why it works at full speed although `pace` is lower: it would be "late", or somebody waits for it ("awaited")."""
    bytes_to_upload: int = 0
    bytes_uploaded: int = 0
    """Bytes that go from the spool to the root, and those of them that are there; 0 without a spool."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's view of its root: the saves in flight and the last ones that ended, newest last."""

    root: str
    start: int
    rank: int
    world_size: int
    latest: str | None
    in_flight: int
    saves_committed: int
    saves_failed: int
    """Without those that were skipped or superseded."""
    saves_superseded: int = 0
    """Saves that were dropped from the spool for newer ones."""
    waited_s: float = 0.0
    """How long calls of save() waited because two earlier saves were not written yet, added up."""
    attempts: tuple[AttemptStatus, ...]
    sidecar: str | None = None
    """The socket of the sidecar that this rank uses; None without a sidecar."""
    sidecar_connected: bool = False
    sidecar_trouble: str = ""
    """Why the sidecar is not there, does not reach the root, or has refused this rank, as far as known; empty if it works."""
    overhead: float | None = None
    """How much longer steps take while a save is in flight, as a part of a step; None while too few steps are known."""
    pace: float = 1.0
    """The part of the time in which saves work, so that steps stay below `max_overhead`; 1 is full speed."""

    requests: Requests | None = None
    """The requests that this rank has sent to the bucket; a sidecar reports its own. None if the root is not in a bucket."""

    export: ExportProgress | None = None
    """How far the exports of this rank have come; None without `export`, and on other ranks than 0."""

    def to_json(self) -> str:
        """The same as JSON."""
        return msgspec.json.encode(self).decode()
