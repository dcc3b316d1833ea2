"""The daemon's status as plain typed data, which the socket, HTTP, the metrics and the page show.

In bytes and seconds. Times are seconds since 1970 by this machine's clock. They are for people; no decision depends on them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from checkpointd.commands import command
from checkpointd.export.progress import ExportProgress
from checkpointd.layout.log_records import ReadBackState
from checkpointd.layout.manifest import ErrorReport, Inline
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.mirror.news import MirrorProgress
from checkpointd.store.requests import Requests

JSON_BYTES_MAX = 4 << 20
ELSEWHERE = f"Let another daemon serve some of the roots. {command('status', 'ROOT')} looks at one by itself."
"""What to do if a daemon has too many roots for one status."""
_KEPT = (64, 8, 0)
"""Ended saves that are shown of each root if the status is too long; each number is tried in turn."""


class SaveStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One save of one rank of this node: the rank's side of an attempt.

    `phase`: staging, staged, persisting, spooled, uploading, prepared; committed, aborted, fenced, superseded, failed, skipped
    at the end. `raw_done`: how many of `raw_total` bytes are on the disk, past the system's cache. `uploaded`: how many of
    `upload_total` bytes have gone from the spool to the root; both are 0 without a spool. `speed_bps`: raw bytes written per
    second; `eta_s`: the time left at that speed (None if unknown). `votes_missing`: only on the coordinator, else None.
    """

    tag: str
    attempt: str
    step: int
    rank: int
    phase: str
    raw_total: int
    raw_done: int
    stored: int
    speed_bps: float | None = None
    eta_s: float | None = None
    votes_missing: tuple[int, ...] | None = None
    error: ErrorReport | None = None
    began_at: float
    """When save() was called, or when the daemon heard of it."""
    staged_at: float | None = None
    """When the snapshot was whole."""
    persisting_at: float | None = None
    spooled_at: float | None = None
    """When the shard was durable in the spool."""
    uploading_at: float | None = None
    """When its upload began."""
    uploaded: int = 0
    upload_total: int = 0
    voted_at: float | None = None
    """When this rank had voted."""
    ended_at: float | None = None
    advice: str = ""
    """What to do about `error`."""
    no_progress: bool = False
    """It was committed, although no trained tensor had changed since the checkpoint before."""
    seconds: PhaseSeconds = PhaseSeconds()
    pace: float = 1.0
    """The part of the time in which it works, at its trainer's wish; 1 is full speed."""
    rested_s: float = 0.0
    """How long its workers have rested for that, added up."""
    """How long its parts took: staging, persisting (hash, codec and disk are parts of that), waiting for the outcome."""
    inline: Inline | None = None
    """Why its trainer persisted it inline; None if this daemon persisted it."""


class RankStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of this node. `connected`: its trainer is connected. `stall_s`: seconds that its saves held training, in all."""

    rank: int
    world_size: int
    start: int | None
    pid: int
    connected: bool
    since: float
    saves_committed: int
    saves_failed: int
    bytes_persisted: int
    bytes_stored: int
    stall_s: float
    saves_no_progress: int = 0
    """Commits after which no trained tensor had changed on any rank, although the step had moved on."""
    saves_inline: int = 0
    """Inline saves, because the sidecar refused them or was lost; also counted in the other numbers."""
    gone_at: float | None = None
    """When its last connection ended; None while it is connected."""
    left_well: bool = False
    """Whether its trainer closed its Checkpointer; a trainer that was killed did not."""


class HeldStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A retained snapshot."""

    tag: str
    attempt: str
    step: int
    rank: int
    nbytes: int
    phase: str


class CheckpointStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint at a root, by its commit."""

    tag: str
    attempt: str
    step: int
    world_size: int
    order: tuple[int, int]
    committed_at: float | None
    """None if its commit does not say."""
    is_latest: bool
    read_back: ReadBackState = "no"
    """Whether it was read back, and the result."""


class PastSave(msgspec.Struct, frozen=True, kw_only=True):
    """One decided attempt, by its decision. None: that does not say."""

    tag: str
    step: int
    at: float
    """When it was decided."""
    committed: bool
    took_s: float | None = None
    """From save() on rank 0 to the commit."""
    held_s: float | None = None
    """How long it held training, on the rank where that was longest."""
    raw_bytes: int | None = None
    """Bytes of all ranks, before compression."""
    stored_bytes: int | None = None
    metrics: dict[str, float] = {}


class SpaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of a root, which other programs may fill, too. None: not known yet."""

    free_bytes: int
    total_bytes: int
    growth_bytes_per_day: float | None = None
    """How many more bytes are used each day; negative if the file system gets emptier."""
    days_left: float | None = None
    """Days until it is full at that rate; None also if it does not get fuller."""


State = Literal["unreadable", "damaged", "failing", "trainers gone", "late", "healthy", "closed", "idle"]
"""The state of a root in a word; the most urgent comes first."""


class RootVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on a root: its `state`, and the `reason` in a sentence. `mood`: `bad`, somebody has to act; `doubt`, somebody
    should look; `good`; `quiet`, nothing runs here.
    """

    state: State
    mood: Literal["bad", "doubt", "good", "quiet"]
    reason: str


UNJUDGED = RootVerdict(state="idle", mood="quiet", reason="")


class RootStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A job's root: its ranks on this node, their saves in flight and the last ones that ended (newest last)."""

    root: str
    name: str = ""
    """The name from the configuration, or empty."""
    latest: str | None
    """The tag that `latest` names; None if there is none, or it was not read yet."""
    newest_step: int | None
    newest_committed_at: float | None
    checkpoints: tuple[CheckpointStatus, ...]
    """The newest committed checkpoints at the root, newest first, when it was last listed."""
    ranks: tuple[RankStatus, ...]
    in_flight: tuple[SaveStatus, ...]
    recent: tuple[SaveStatus, ...]
    """At most `hub_status.RECENT_MAX`."""
    held: tuple[HeldStatus, ...]
    commit_s: tuple[float, ...]
    """Seconds from save() to the commit of the last committed attempts, by the coordinator; empty on other nodes."""
    problem: ErrorReport | None = None
    """Why the root cannot be looked at, if it cannot."""
    problem_advice: str = ""
    """What to do about `problem`."""
    every_s: float | None = None
    """The median of the seconds between the last saves; None if fewer than three saves are known."""
    next_due_at: float | None = None
    """When the next save is due, if the trainers go on as before; None if unknown."""
    verdict: RootVerdict = UNJUDGED
    history: tuple[PastSave, ...] = ()
    """The last decided attempts, oldest first."""
    space: SpaceStatus | None = None
    requests: Requests | None = None
    """The requests to the bucket since the daemon opened it; None if the root is not in a bucket."""


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that clients use in the daemon, in all (`mapped`) and for retained snapshots (`held`), with the limits."""

    mapped: int
    mapped_max: int
    held: int
    held_max: int


class SpoolStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The spool of this node. Counts are since the daemon's start."""

    directory: str
    used_bytes: int | None
    """None: not looked at yet."""
    free_bytes: int | None
    """Free bytes of its disk."""
    bytes_max: int | None
    keep: Literal["all", "newest"]
    waiting: int
    """Shards that wait for their upload, or for other ranks."""
    waiting_bytes: int
    bandwidth_bps: float | None
    spooled: int
    """Shards that became durable in the spool."""
    uploaded: int
    """Shards of those whose save was committed."""
    uploaded_bytes: int
    superseded: int
    """Shards that were dropped for a newer save."""
    direct_full: int
    """Shards that went straight to the root, since the spool was full."""
    direct_failed: int
    """Shards that went straight to the root, since the spool's disk failed."""
    damaged: int
    """Records that were damaged when the daemon began."""
    resumed: int
    """Shards that an earlier daemon had left, and that this one took up."""


class DaemonStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The whole status."""

    release: str
    host: str
    pid: int
    socket: str
    started_at: float
    now: float
    clients: int
    clients_max: int
    refused: int
    """Connections and requests refused since the daemon started."""
    refusals: dict[str, int] = {}
    """The same by reason: see `hub.REASONS`."""
    leaving: bool
    """Whether the daemon got SIGTERM: it finishes the saves in flight and takes no new ones."""
    memory: MemoryStatus
    bandwidth_bps: float | None
    serves: tuple[str, ...] = ()
    """The directories and buckets at or below which trainers may have their roots."""
    spool: SpoolStatus | None = None
    """None: this daemon has no spool."""
    roots: tuple[RootStatus, ...]
    """The most urgent first: see `verdict.attention`."""
    mirrors: tuple[MirrorProgress, ...] = ()
    """The roots that the daemon mirrors to other places."""
    exports: tuple[ExportProgress, ...] = ()
    """The roots whose checkpoints the daemon exports for other programs."""
    left_out: tuple[str, ...] = ()
    """Each part that is missing here, with the reason and what to do, in a few sentences."""

    def to_json(self) -> bytes:
        """The status as JSON, at most JSON_BYTES_MAX. If parts had to be left out, `left_out` names them."""
        shown = self
        for most in _KEPT:
            text = msgspec.json.encode(shown)
            if len(text) <= JSON_BYTES_MAX:
                return text
            shown = self._cut(most)
        while len(text := msgspec.json.encode(shown)) > JSON_BYTES_MAX:
            kept = shown.roots[: len(shown.roots) // 2]
            words = f"{len(self.roots) - len(kept)} of {len(self.roots)} roots, and all but the saves in flight of the others"
            shown = msgspec.structs.replace(shown, roots=kept, left_out=self._without(words))
        return text

    def _cut(self, most: int) -> DaemonStatus:
        """The status with at most `most` of each root's ended saves, checkpoints and commit times."""
        words = f"all but the last {most} ended saves and checkpoints of each root"
        cut = tuple(_root_cut(root, most) for root in self.roots)
        return msgspec.structs.replace(self, roots=cut, left_out=self._without(words))

    def _without(self, words: str) -> tuple[str, ...]:
        """`left_out` with the additional part `words`."""
        return (*self.left_out, f"This is too long to be told whole: {words} are left out. {ELSEWHERE}")


def _root_cut(root: RootStatus, most: int) -> RootStatus:
    return msgspec.structs.replace(
        root,
        recent=root.recent[-most:] if most else (),
        history=root.history[-most:] if most else (),
        checkpoints=root.checkpoints[:most],
        commit_s=root.commit_s[-most:] if most else (),
    )
