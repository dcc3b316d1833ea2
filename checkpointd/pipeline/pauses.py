"""How long to pause between two looks for what other ranks write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from checkpointd.config import CommitConfig
from checkpointd.store.base import Capabilities

LOOKS_PER_S: Final = 500
"""So many looks a second all ranks of a job make together where each look is a request: S3 answers 5,500 for one prefix."""
_GROWTH: Final = 1.5
_LONGEST: Final = 10
"""The longest pause, in looks, where each look is charged."""


def pauses(commit: CommitConfig, capabilities: Capabilities, ranks: int = 1) -> Iterator[float]:
    """Seconds to pause, longer each time. `ranks`: how many look at the same time."""
    look_s = capabilities.look_s
    longest = max(commit.poll_max_s, _LONGEST * look_s, ranks / LOOKS_PER_S if look_s else 0.0)
    pause = max(commit.poll_min_s, look_s)
    while True:
        yield pause
        pause = min(pause * _GROWTH, longest)
