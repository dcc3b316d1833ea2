"""The daemon's state as plain typed data: what the socket, HTTP, the metrics and the page all show.

Bytes and seconds. Times of day are seconds since 1970 by this machine's clock, for people; no decision is taken from them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from checkpointd.commands import command
from checkpointd.layout.manifest import ErrorReport, Inline
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.root.catalog import ReadBackState

JSON_BYTES_MAX = 4 << 20
ELSEWHERE = f"Let another daemon serve some of the roots. {command('status', 'ROOT')} looks at one by itself."
"""What to do where a daemon has more roots than it can tell of."""
_KEPT = (64, 8, 0)
"""So many ended saves of each root are told where all of them are too many."""


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
    speed_bps: float | None = None
    eta_s: float | None = None
    votes_missing: tuple[int, ...] | None = None
    error: ErrorReport | None = None
    began_at: float
    """save() was called, or the daemon heard of it."""
    staged_at: float | None = None
    """The snapshot was whole."""
    persisting_at: float | None = None
    voted_at: float | None = None
    """This rank's vote was durable."""
    ended_at: float | None = None
    advice: str = ""
    """What to do about `error`."""
    no_progress: bool = False
    """It was committed, and what is trained had not changed since the checkpoint before."""
    seconds: PhaseSeconds = PhaseSeconds()
    """How long it took for what: staging, persisting (of which hash, codec and disk are parts), waiting for the outcome."""
    inline: Inline | None = None
    """Why its trainer persisted it itself; None where this daemon did."""


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
    saves_no_progress: int = 0
    """Of those committed: the step had moved on, and on no rank anything that is trained had changed."""
    saves_inline: int = 0
    """Saves that its trainer persisted itself, since the sidecar refused them or was lost. They are among those that ended."""
    gone_at: float | None = None
    """When its last connection ended; None while it is connected."""
    left_well: bool = False
    """Its trainer said that it ends; one that was killed, or hung up, did not."""


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


class PastSave(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that was decided, as its outcome tells. None where that does not say."""

    tag: str
    step: int
    at: float
    """When it was decided."""
    committed: bool
    took_s: float | None = None
    """From save() on rank 0 to the commit."""
    held_s: float | None = None
    """For how long it held training, on the rank where that was longest."""
    raw_bytes: int | None = None
    """Of all ranks, before compression."""
    stored_bytes: int | None = None
    metrics: dict[str, float] = {}


class SpaceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The file system of a root, whoever fills it. None where nothing can be said yet."""

    free_bytes: int
    total_bytes: int
    growth_bytes_per_day: float | None = None
    """How much fuller it gets in a day, with all that is removed counted in; below 0 where it gets emptier."""
    days_left: float | None = None
    """Until it is full if that goes on; None also where it does not get fuller."""


State = Literal["unreadable", "damaged", "failing", "trainers gone", "late", "healthy", "closed", "idle"]
"""How a root does, in a word; what most needs a look comes first."""


class RootVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """How a root does, in words: `state`, and the `reason` in a sentence. `mood`: `bad`, somebody has to act; `doubt`, somebody
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
    """What people call it, as the configuration says; empty where it does not."""
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
    problem_advice: str = ""
    """What to do about `problem`."""
    every_s: float | None = None
    """Seconds between the last saves, the median; None where fewer than three are known."""
    next_due_at: float | None = None
    """When the next save is due, if the trainers go on as they did; None where that is not known."""
    verdict: RootVerdict = UNJUDGED
    history: tuple[PastSave, ...] = ()
    """Attempts that were decided, oldest first: where there are many, of each few in a row the one that took longest."""
    space: SpaceStatus | None = None


class MemoryStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that clients make the daemon hold, in all and for restarts, and how many of each may be."""

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
    refusals: dict[str, int] = {}
    """The same by reason: see `hub.REASONS`."""
    leaving: bool
    """SIGTERM came: what is in flight is being finished, nothing new is taken."""
    memory: MemoryStatus
    bandwidth_bps: float | None
    roots: tuple[RootStatus, ...]
    """Those that need a look come first: see `verdict.attention`."""
    left_out: tuple[str, ...] = ()
    """What is missing here, why, and what to do, in a few sentences each; empty: nothing."""

    def to_json(self) -> bytes:
        """At most JSON_BYTES_MAX: where it is more, `left_out` says what it does without."""
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
        """With at most `most` of each root's ended saves, checkpoints and commit times."""
        words = f"all but the last {most} ended saves and checkpoints of each root"
        cut = tuple(_root_cut(root, most) for root in self.roots)
        return msgspec.structs.replace(self, roots=cut, left_out=self._without(words))

    def _without(self, words: str) -> tuple[str, ...]:
        """`left_out` where this has to do without `words` as well."""
        return (*self.left_out, f"This is too long to be told whole: {words} are left out. {ELSEWHERE}")


def _root_cut(root: RootStatus, most: int) -> RootStatus:
    return msgspec.structs.replace(
        root,
        recent=root.recent[-most:] if most else (),
        checkpoints=root.checkpoints[:most],
        commit_s=root.commit_s[-most:] if most else (),
    )
