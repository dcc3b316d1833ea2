"""The daemon's state as plain typed data: what the socket, HTTP, the metrics and the page all show.

Bytes and seconds. Times of day are seconds since 1970 by this machine's clock, for people; no decision is taken from them.
"""

from __future__ import annotations

import msgspec

from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.catalog import ReadBackState


class SaveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One save of one rank of this node: the rank's side of an attempt.

    `phase`: staging, staged, persisting, prepared; committed, aborted, fenced, failed, skipped at the end. `raw_done`: of
    `raw_total` bytes, those that are on the disk, past the system's cache. `speed_bps`: raw bytes written per second, `eta_s`
    what is left at that speed (None where nothing can be said). `votes_missing`: on the coordinator only, else None.
    """

    tag: str
    attempt: str
    step: int
    rank: int
    phase: str
    raw_total: int
    raw_done: int
    stored: int
    speed_bps: float | None
    eta_s: float | None
    votes_missing: tuple[int, ...] | None
    error: ErrorReport | None
    began_at: float
    """save() was called, or the daemon heard of it."""
    staged_at: float | None
    """The snapshot was whole."""
    persisting_at: float | None
    voted_at: float | None
    """This rank's vote was durable."""
    ended_at: float | None
    advice: str = ""
    """What to do about `error`."""
    stale: bool = False
    """It was committed, and what is trained had not changed since the checkpoint before."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of this node. `connected`: its trainer is there; `stall_s`: seconds that its saves held training, in all."""

    rank: int
    world_size: int
    epoch: int | None
    pid: int
    connected: bool
    since: float
    saves_committed: int
    saves_failed: int
    bytes_persisted: int
    bytes_stored: int
    stall_s: float
    saves_stale: int = 0
    """Of those committed: the step had moved on, and on no rank anything that is trained had changed."""


class HeldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot in the memory tier."""

    tag: str
    attempt: str
    step: int
    rank: int
    nbytes: int
    phase: str


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint at a root, as its outcome tells."""

    tag: str
    attempt: str
    step: int
    world_size: int
    order: tuple[int, int]
    committed_at: str
    is_latest: bool
    read_back: ReadBackState = "no"
    """Whether it was read back since it was written, and what was found."""


class RootStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job's root: its ranks on this node, their saves in flight and the last ones that ended (newest last)."""

    root: str
    latest: str | None
    """The tag that `latest` names; None where there is none, or it was not read yet."""
    newest_step: int | None
    newest_committed_at: float | None
    checkpoints: tuple[CheckpointStatus, ...]
    """The newest committed checkpoints at the root, newest first, when it was last listed."""
    ranks: tuple[RankStatus, ...]
    in_flight: tuple[SaveStatus, ...]
    recent: tuple[SaveStatus, ...]
    """At most `standing.RECENT_MAX` of them."""
    held: tuple[HeldStatus, ...]
    commit_s: tuple[float, ...]
    """Seconds from save() to the commit of the last committed attempts, by the coordinator; empty on other nodes."""
    problem: ErrorReport | None = None
    """Why the root cannot be looked at, if it cannot."""


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of snapshots: mapped in all, held for restarts, and how many of each may be."""

    mapped: int
    mapped_max: int
    held: int
    held_max: int


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Everything."""

    release: str
    host: str
    pid: int
    socket: str
    started_at: float
    now: float
    clients: int
    clients_max: int
    refused: int
    """Connections and requests refused since the start."""
    leaving: bool
    """SIGTERM came: what is in flight is being finished, nothing new is taken."""
    memory: MemoryStatus
    bandwidth_bps: float | None
    roots: tuple[RootStatus, ...]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)
