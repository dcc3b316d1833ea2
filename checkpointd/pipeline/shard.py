"""What the writer is handed: one rank's snapshot in host memory, and which attempt it belongs to."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from checkpointd.errors import UsageError
from checkpointd.layout.boxes import Box
from checkpointd.layout.keys import HANDS_MAX, AttemptId, attempt_prefix
from checkpointd.layout.manifest import Alias, Plan, PlanTensor, Scope

Bytes = NDArray[np.uint8]

TENSOR_ALIGNMENT = 64
PAGE = 4096


def finite(metrics: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """`metrics` as an attempt carries them: what is infinite or no number cannot be the best, and is left out."""
    return tuple((name, value) for name, value in metrics.items() if math.isfinite(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptInfo:
    """One try at one tag, as one rank sees it; `n` counts this rank's saves in its epoch.

    `hand`: which writer of this snapshot this is; the first is 0, and whoever takes the attempt over from one that was lost
    takes the next. `handed`: other hands may write the same snapshot, so a vote of this rank may be another hand's. A hand
    that cannot be raises UsageError.
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
    hand: int = 0
    handed: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.hand < HANDS_MAX:
            raise UsageError(f"hand {self.hand} cannot be: a shard has at most {HANDS_MAX} writers, one after the other")

    @property
    def prefix(self) -> str:
        return attempt_prefix(self.tag, self.attempt)

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One box of one tensor, row-major at byte `offset` of the image, `nbytes` long; `itemsize` bytes per element."""

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
    """A complete snapshot: `image` is the slot's memory, page-aligned, a whole number of pages, unchanged until persisted."""

    image: Bytes
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


@dataclass(slots=True)
class Progress:
    """Bytes of one shard, as far as persisting has come; written by the writer's thread alone, read by any."""

    raw_total: int = 0
    raw_done: int = 0
    stored: int = 0
    stale: bool = False
    """The save was committed, and what is trained had not changed since the one before."""
    on_change: Callable[[], None] | None = field(default=None, repr=False)

    def add(self, raw: int, stored: int) -> None:
        self.raw_done += raw
        self.stored += stored
        if self.on_change:
            self.on_change()
