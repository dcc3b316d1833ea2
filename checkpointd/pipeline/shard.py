"""A shard as the writer gets it: one rank's snapshot in host memory, and its attempt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from checkpointd.errors import UsageError
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import TAKEOVERS_MAX, AttemptId, attempt_prefix
from checkpointd.layout.manifest import Alias, Inline, Plan, PlanTensor, Scope
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.meter import SaveMeter

Bytes = NDArray[np.uint8]

COORDINATOR = 0
"""The rank that decides, and removes."""
TENSOR_ALIGNMENT = 64
PAGE = 4096


def aligned(nbytes: int) -> int:
    """The bytes that a tensor of `nbytes` takes in a buffer: the next tensor begins behind them."""
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def finite(metrics: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """`metrics` as an attempt carries them: what is infinite or no number cannot be the best, and is left out."""
    return tuple((name, value) for name, value in metrics.items() if math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """One try at one tag, as one rank sees it; `n` counts this rank's saves in its epoch.

    `takeover`: which writer of this snapshot this is; the first is 0, and whoever takes the attempt over from one that was lost
    takes the next. `may_be_taken_over`: other writers may write the same snapshot, so a vote of this rank may be another
    writer's. A writer that cannot be raises UsageError.
    """

    tag: str
    attempt: AttemptId
    rank: int
    world_size: int
    step: int
    n: int
    save_latest: bool = True
    metrics: tuple[tuple[str, float], ...] = ()
    """What the user says of the checkpoint, for retention to choose by: finite numbers by name."""
    takeover: int = 0
    may_be_taken_over: bool = False
    inline: Inline | None = None
    """Why the trainer persists this itself, although it uses a sidecar."""
    unfinished: str = ""
    """The directory that was filled for this save, and gets its name when its files are shown: see `unfinished.py`."""
    leftovers: tuple[str, ...] = ()
    """How the names of files end that go from the directory in which the files are shown, unless they are of this save."""

    def __post_init__(self) -> None:
        if not 0 <= self.takeover < TAKEOVERS_MAX:
            raise UsageError(
                f"takeover {self.takeover} cannot be: a shard has at most {TAKEOVERS_MAX} writers, one after the other"
            )

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One box of one tensor, row-major at byte `offset` of the buffer, `nbytes` long; `itemsize` bytes per element."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box
    scope: Scope
    offset: int
    nbytes: int
    itemsize: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A complete snapshot: `buffer` is the slot's memory, page-aligned, a whole number of pages, unchanged until persisted."""

    buffer: Bytes
    tensors: tuple[ShardTensor, ...]
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    tree: bytes

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def plan(self, info: AttemptInfo) -> Plan:
        parts = tuple(PlanTensor(t.fqn, t.dtype, t.shape, t.box, t.scope) for t in self.tensors)
        return Plan(rank=info.rank, world_size=info.world_size, tensors=parts)


NEARLY_DONE = 0.99
"""What progress says where all bytes are written and the vote is not durable: it may still take a while, or fail."""


@dataclass(slots=True)
class ShardProgress:
    """How many bytes of one shard are on the disk; written by the writer's thread alone, read by any.

    A byte counts once it has left this process and the system's cache, or when it was there before. `clock` gives seconds.
    """

    raw_total: int = 0
    raw_done: int = 0
    raw_kept: int = 0
    """Of those done, bytes that are unchanged, and were there before."""
    stored: int = 0
    no_progress: bool = False
    """The save was committed, and what is trained had not changed since the one before."""
    held_s: float = 0.0
    """Seconds for which the save has held training."""
    spent: SaveMeter = field(default_factory=SaveMeter)
    """What it took so far, where this process persists it."""
    told: PhaseSeconds | None = None
    """The same where another process does, as it says."""
    on_change: Callable[[], None] | None = field(default=None, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _since: float | None = None
    _until: float | None = None

    def begin(self, raw_total: int) -> None:
        """Nothing of `raw_total` bytes is done yet."""
        self.raw_total = raw_total
        self.raw_done = self.raw_kept = self.stored = 0
        self._since = self._until = None

    def keep(self, raw: int) -> None:
        """So many bytes are unchanged; the others are written from now on."""
        self.raw_kept = raw
        self._since = self.clock()
        self.add(raw, 0)

    def add(self, raw: int, stored: int) -> None:
        """So many bytes, `stored` after encoding, are on the disk now."""
        self.raw_done += raw
        self.stored += stored
        if self.on_change:
            self.on_change()

    def end(self) -> None:
        """The vote is durable: its speed is what it was up to now."""
        self._until = self._until or self.clock()

    @property
    def seconds(self) -> PhaseSeconds:
        """How long it took for what."""
        return self.told or self.spent.seconds()

    def mirror(
        self,
        *,
        raw_total: int,
        raw_done: int,
        raw_kept: int,
        stored: int,
        writing_s: float | None,
        seconds: PhaseSeconds | None = None,
    ) -> None:
        """Be as another process says that it is, which has written for `writing_s` seconds."""
        self.told = seconds
        self.raw_total, self.raw_done, self.raw_kept, self.stored = raw_total, raw_done, raw_kept, stored
        now = self.clock() if self._until is None else self._until
        self._since = None if writing_s is None else now - writing_s

    @property
    def fraction(self) -> float:
        """The part that is done, 0 to NEARLY_DONE: whether all of it holds only the vote can say."""
        return part_done(self.raw_done, self.raw_total)

    @property
    def writing_s(self) -> float | None:
        """How long it has been written; None before that."""
        if self._since is None:
            return None
        return max(0.0, (self.clock() if self._until is None else self._until) - self._since)

    @property
    def speed_bps(self) -> float | None:
        """Bytes per second that were written, before encoding; None where none was."""
        written, seconds = self.raw_done - self.raw_kept, self.writing_s
        return written / seconds if written > 0 and seconds else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until all is written, at the speed so far; None where nothing can be said, or only the vote is left."""
        left, speed = self.raw_total - self.raw_done, self.speed_bps
        return left / speed if left > 0 and speed else None


def part_done(raw_done: int, raw_total: int) -> float:
    """The part of a shard that is on the disk while its vote is not durable: 0 to NEARLY_DONE."""
    return min(raw_done / raw_total, NEARLY_DONE) if raw_total else 0.0


class Share:
    """Tells `progress` of `raw` bytes little by little, while the `nbytes` bytes that they become are written."""

    def __init__(self, progress: ShardProgress, raw: int, nbytes: int) -> None:
        self._progress, self._raw, self._nbytes = progress, raw, nbytes
        self._written = 0

    def written(self, nbytes: int) -> None:
        """So many more bytes are on the disk."""
        before = self._raw * self._written // self._nbytes
        self._written += nbytes
        self._progress.add(self._raw * self._written // self._nbytes - before, nbytes)
