"""Counters since the daemon began, for one rank or for all ranks of this node at one root. They only grow."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from checkpointd.daemon.status.model import SaveStatus
from checkpointd.layout.manifest import InlineReason
from checkpointd.layout.save_timings import PhaseSeconds

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the buckets, in seconds: from a small job on a local disk to a save that waited until its deadline."""


@dataclass(slots=True)
class Durations:
    """A histogram of seconds; the last bucket has no upper bound."""

    total_s: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration. The wall clock may go back, so a negative duration counts as 0."""
        seconds = max(0.0, seconds)
        self.total_s += seconds
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each upper bound with the number of durations up to it; infinity last."""
        below = 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below


RESULTS = ("committed", "aborted", "fenced", "superseded", "failed", "skipped")
PARTS = tuple(field.name for field in msgspec.structs.fields(PhaseSeconds))


@dataclass(slots=True)
class TimeTally:
    """How long one part of the saves took in all, and the number of saves."""

    total_s: float = 0.0
    saves: int = 0


@dataclass(slots=True)
class Tally:
    """The counters. Every series exists from the start, with 0."""

    results: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RESULTS, 0))
    inline: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(InlineReason), 0))
    """Inline saves, by reason."""
    no_progress: int = 0
    """Commits after which no trained tensor had changed, although the step had moved on."""
    bytes_persisted: int = 0
    bytes_stored: int = 0
    stall_s: float = 0.0
    """How long saves held training; at a root, for the rank that was held longest."""
    rested_s: float = 0.0
    """How long the workers of saves have rested at the trainers' wish, added up."""
    spent: dict[str, TimeTally] = field(default_factory=lambda: {part: TimeTally() for part in PARTS})
    commits: Durations = field(default_factory=Durations)
    """From save() to the commit, of the coordinator's saves."""

    @property
    def committed(self) -> int:
        return self.results["committed"]

    @property
    def failed(self) -> int:
        """Saves that ended without a commit."""
        return sum(self.results.values()) - self.committed

    def persisted(self, raw: int, stored: int) -> None:
        """Count the bytes of a shard whose rank has voted yes."""
        self.bytes_persisted += raw
        self.bytes_stored += stored

    def ended(self, save: SaveStatus) -> None:
        """Count a save that has ended."""
        self.results[save.phase] += 1
        self.rested_s += save.rested_s
        for part, spent in self.spent.items():
            seconds = getattr(save.seconds, part)
            if seconds is not None:
                spent.total_s += seconds
                spent.saves += 1
        if save.phase == "committed":
            self.no_progress += save.no_progress
            if (took_s := took(save)) is not None:
                self.commits.add(took_s)


def took(save: SaveStatus) -> float | None:
    """Seconds from save() to the commit, for a save of rank 0; None for all others."""
    if save.rank != 0 or save.phase != "committed" or save.ended_at is None:
        return None
    return max(0.0, save.ended_at - save.began_at)
