"""Detects torn snapshots: save() takes a sample of the tensors that are copied later.

When everything is copied, the sample is compared with the slot, not with the sources. So the result does not depend on how the
copy and a change of a source interleaved. torch's version counters miss some changes. A sample catches every change that
reaches a sampled byte before the copy does.

Invariants
  TORN-1  A sample never calls a good snapshot torn: it reads the bytes that the copy reads, in the copy's order.
  Samples are read by address: PLACES-1 in `places.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from checkpointd.pipeline.shard import Bytes
from checkpointd_client.staging.places import Points


class Proof(Protocol):
    """A check that a slot holds the bytes that sources in host memory had at save(). Devices have sums (`block_sums.py`)."""

    def torn(self) -> int | None:
        """The position of the first tensor whose bytes in the slot differ from those at save(); None if no difference is known.

        Called once, when the slot holds all of the snapshot.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Sampled bytes of the sources at save(), and the slot `buffer` to compare them with."""

    points: tuple[Points, ...]
    taken: tuple[Bytes, ...]
    buffer: Bytes

    def torn(self) -> int | None:
        """The position of the first source whose sampled bytes differ from `buffer`; None if all agree."""
        torn: list[int] = []
        for points, taken in zip(self.points, self.taken, strict=True):
            found = points.in_slot(self.buffer)
            words = "<u8" if points.unit % 8 == 0 else "u1"
            if not np.array_equal(found.view(words), taken.view(words)):
                differ = (found != taken).reshape(-1, points.unit).any(axis=1)
                torn.append(int(points.owner[differ].min()))
        return min(torn, default=None)

    @classmethod
    def take(cls, points: tuple[Points, ...], buffer: Bytes) -> Sample:
        """Sample what lies at `points` now. The copies go to `buffer`."""
        return cls(points, tuple(one.in_memory() for one in points), buffer)
