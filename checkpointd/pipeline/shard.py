"""A shard as the writer receives it: one rank's snapshot in host memory, and its attempt."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from checkpointd.layout.boxes import Box
from checkpointd.layout.indexes import Alias, PlanTensor, Scope
from checkpointd.layout.keys import COORDINATOR as COORDINATOR
from checkpointd.layout.keys import AttemptId, attempt_prefix, object_key
from checkpointd.layout.manifest import Branches, Inline
from checkpointd.layout.save_timings import PhaseSeconds
from checkpointd.pipeline.meter import SaveMeter
from checkpointd.pipeline.pace import Pace

Bytes = NDArray[np.uint8]

TENSOR_ALIGNMENT = 64
PAGE = 4096

_NBYTES = attrgetter("nbytes")


def aligned(nbytes: int) -> int:
    """The bytes that a tensor of `nbytes` takes in a buffer, with the padding before the next tensor."""
    return -(-nbytes // TENSOR_ALIGNMENT) * TENSOR_ALIGNMENT


def finite(metrics: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """`metrics` without infinite values and NaN, which cannot be the best."""
    return tuple((name, value) for name, value in metrics.items() if math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """One attempt as one rank sees it. `n` is the number of the save among this rank's saves in its start."""

    tag: str
    attempt: AttemptId
    rank: int
    world_size: int
    step: int
    n: int
    save_latest: bool = True
    metrics: tuple[tuple[str, float], ...] = ()
    """The metrics that the user passed to save(): finite numbers by name, which retention uses."""
    left: Branches = ()
    """The branches that were left on the way to this save (`CommitRecord.left`)."""
    inline: Inline | None = None
    """Set if this is an inline save."""
    unfinished: str = ""
    """The directory that was filled for this save; it gets its final name when the files are shown (see `unfinished.py`)."""
    shown_at: str = ""
    """For a state: an empty directory appears here at the commit, and goes with the checkpoint. Relative, as for files."""
    required: bool = False
    """Whether it must not be dropped for a newer save."""

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    def key(self, name: str) -> str:
        return object_key(self.prefix, name)


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

    @property
    def part(self) -> PlanTensor:
        return PlanTensor(self.fqn, self.dtype, self.shape, self.box, self.scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A complete snapshot. `buffer` is the slot's memory: whole aligned pages that do not change until they are persisted."""

    buffer: Bytes
    tensors: tuple[ShardTensor, ...]
    aliases: tuple[Alias, ...] = ()
    excluded: tuple[str, ...] = ()
    tree: bytes
    nbytes: int = field(init=False)
    """The bytes of all tensors."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "nbytes", sum(map(_NBYTES, self.tensors)))  # no line of Python for one


NEARLY_DONE = 0.99
"""The progress of a shard whose bytes are all written but whose rank has not voted. It may still take a while, or fail."""


@dataclass(slots=True)
class ShardProgress:
    """How many bytes of one shard are on the disk. Only the writer's thread changes it; any thread may read it.

    A byte counts when it has reached the disk, or when an older attempt holds it. `clock` gives seconds.
    """

    raw_total: int = 0
    raw_done: int = 0
    raw_kept: int = 0
    """The part of `raw_done` that is unchanged and was not written again."""
    stored: int = 0
    no_progress: bool = False
    """Whether the save was committed although no trained tensor had changed since the checkpoint before."""
    held_s: float = 0.0
    """Seconds for which the save has held training."""
    spent: SaveMeter = field(default_factory=SaveMeter)
    """The times so far, if this process persists the shard."""
    upload_total: int = 0
    """The bytes that go from the spool to the root; 0 without a spool."""
    uploaded: int = 0
    told: PhaseSeconds | None = None
    """The times that another process has reported, if it persists the shard."""
    pace: Pace = field(default_factory=Pace)
    """How fast the shard may be written."""
    on_change: Callable[[], None] | None = field(default=None, repr=False)
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)
    _since: float | None = None
    _until: float | None = None

    def begin(self, raw_total: int) -> None:
        """Start to count a shard of `raw_total` bytes."""
        self.raw_total = raw_total
        self.raw_done = self.raw_kept = self.stored = 0
        self._since = self._until = None

    def keep(self, raw: int) -> None:
        """Count `raw` unchanged bytes. The others are written from now on."""
        self.raw_kept = raw
        self._since = self.clock()
        self.add(raw, 0)

    def add(self, raw: int, stored: int) -> None:
        """Count `raw` bytes, which are `stored` bytes after encoding, as on the disk."""
        self.raw_done += raw
        self.stored += stored
        if self.on_change:
            self.on_change()

    async def rest(self, busy_s: float) -> None:
        """Rest after a piece of work that took `busy_s` seconds, as the pace says."""
        seconds = self.pace.rest_after(busy_s, self.eta_s)
        if seconds:
            await asyncio.sleep(seconds)
            self.pace.rested_s += seconds

    def end(self) -> None:
        """Stop the clock: the rank has voted."""
        self._until = self._until or self.clock()

    @property
    def seconds(self) -> PhaseSeconds:
        """How long the parts of the save took."""
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
        rested_s: float = 0.0,
    ) -> None:
        """Take over the numbers of another process, which has written for `writing_s` seconds."""
        self.pace.rested_s = rested_s
        self.told = seconds
        self.raw_total, self.raw_done, self.raw_kept, self.stored = raw_total, raw_done, raw_kept, stored
        now = self.clock() if self._until is None else self._until
        self._since = None if writing_s is None else now - writing_s

    @property
    def fraction(self) -> float:
        """The part that is done, 0 to NEARLY_DONE, since only the vote completes the shard."""
        return part_done(self.raw_done, self.raw_total)

    @property
    def writing_s(self) -> float | None:
        """The seconds since writing began; None before that."""
        if self._since is None:
            return None
        return max(0.0, (self.clock() if self._until is None else self._until) - self._since)

    @property
    def speed_bps(self) -> float | None:
        """The bytes written per second, before encoding; None if none were written."""
        written, seconds = self.raw_done - self.raw_kept, self.writing_s
        return written / seconds if written > 0 and seconds else None

    @property
    def eta_s(self) -> float | None:
        """The seconds until all is written, at the speed so far; None if the speed is unknown, or if only the vote is left."""
        left, speed = self.raw_total - self.raw_done, self.speed_bps
        return left / speed if left > 0 and speed else None


def part_done(raw_done: int, raw_total: int) -> float:
    """The part of a shard that is on the disk before the vote: 0 to NEARLY_DONE."""
    return min(raw_done / raw_total, NEARLY_DONE) if raw_total else 0.0


class Share:
    """Counts `raw` bytes in `progress` in proportion, while the `nbytes` bytes of their objects are written."""

    def __init__(self, progress: ShardProgress, raw: int, nbytes: int) -> None:
        self._progress, self._raw, self._nbytes = progress, raw, nbytes
        self._written = 0

    def written(self, nbytes: int) -> None:
        """Count `nbytes` more bytes as on the disk."""
        before = self._raw * self._written // self._nbytes
        self._written += nbytes
        self._progress.add(self._raw * self._written // self._nbytes - before, nbytes)
