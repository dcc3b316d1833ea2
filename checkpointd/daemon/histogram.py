"""Durations counted in buckets, for the metrics: bounded memory, and nothing forgotten while the daemon lives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

BOUNDS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the buckets, in seconds: from a small job on a local disk to a deadline that was waited for."""


@dataclass(slots=True)
class Durations:
    """A histogram of seconds; the last bucket has no upper bound."""

    total_s: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, seconds: float) -> None:
        """Count one duration; the clock of people may go back, so a negative one counts as none."""
        seconds = max(0.0, seconds)
        self.total_s += seconds
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Each upper bound with how many were at most so long; infinity last."""
        below = 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below
