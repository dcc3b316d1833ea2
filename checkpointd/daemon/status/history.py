"""The history of a root: its attempts as its log has them, and the free space on its file system.

Invariants
  HISTORY-1  The history of saves comes from the log, which a scan reads anyway, so a restarted daemon knows it, too.
  HISTORY-2  The history is bounded: SAVES_MAX attempts and SAMPLES_MAX samples of the space, however long the root is used.
      Checkpoints that retention has removed stay in it.
  HISTORY-3  An unknown value is None, never 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from checkpointd.daemon.status.model import PastSave, SpaceStatus
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.identity import seconds_of

SAVES_MAX = 128
"""The status tells them all: about 2 MB for 64 roots."""
METRICS_MAX = 3
"""Metrics of a save that are kept, the first by name."""
SAMPLE_S = 300.0
"""The time between two samples that are kept."""
SAMPLES_MAX = 864
"""Three days of them."""
SPAN_MIN_S = 3600.0
"""The time after which the growth of a file system can be estimated."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class SpaceSample:
    """The free and total bytes of a file system at a moment."""

    at: float
    free: int
    total: int


@dataclass(slots=True)
class RootHistory:
    """The history of one root."""

    _saves: dict[str, PastSave] = field(default_factory=dict)
    """By the attempt's prefix, in the order in which they were decided."""
    _rooms: deque[SpaceSample] = field(default_factory=lambda: deque(maxlen=SAMPLES_MAX))

    def decided(self, attempts: Iterable[LoggedAttempt]) -> None:
        """Add the attempts that are decided and new."""
        fresh = {one.prefix: past for one in attempts if one.prefix not in self._saves and (past := past_of(one))}
        if fresh:
            ordered = sorted([*self._saves.items(), *fresh.items()], key=lambda item: item[1].at)
            self._saves = dict(ordered[-SAVES_MAX:])

    def measured(self, room: SpaceSample) -> None:
        """Add a sample; it replaces the last one if that is too young to be kept."""
        if self._rooms and self._rooms[-1].total != room.total:
            self._rooms.clear()  # another file system, or it has another size now
        if len(self._rooms) > 1 and room.at - self._rooms[-2].at < SAMPLE_S:
            self._rooms.pop()
        self._rooms.append(room)

    def saves(self) -> tuple[PastSave, ...]:
        """Oldest first, each of them: what is counted or averaged over them is so."""
        return tuple(self._saves.values())

    def space(self) -> SpaceStatus | None:
        return space_left(self._rooms)


def past_of(attempt: LoggedAttempt) -> PastSave | None:
    """The save of an attempt; None if it is undecided, or if its record has no valid time."""
    record = attempt.decision
    at = None if record is None else seconds_of(record.writer.time)
    if at is None:
        return None
    past = PastSave(tag=attempt.tag, step=attempt.step, at=at, committed=attempt.committed is not None)
    if attempt.committed is None:
        return past
    cost, found = attempt.commit.cost, attempt.commit.metrics
    metrics = {name: found[name] for name in sorted(found)[:METRICS_MAX]}
    if cost is None:
        return structs.replace(past, metrics=metrics)
    return structs.replace(
        past,
        metrics=metrics,
        took_s=cost.took_s or None,
        held_s=cost.held_s or None,
        raw_bytes=cost.raw_bytes or None,
        stored_bytes=cost.stored_bytes or None,
    )


def space_left(rooms: Sequence[SpaceSample]) -> SpaceStatus | None:
    """The space by samples of one file system, oldest first; its growth by a least-squares line."""
    if not rooms:
        return None
    last = rooms[-1]
    known = SpaceStatus(free_bytes=last.free, total_bytes=last.total)
    if last.at - rooms[0].at < SPAN_MIN_S:
        return known
    at = sum(room.at for room in rooms) / len(rooms)
    free = sum(room.free for room in rooms) / len(rooms)
    spread = sum((room.at - at) ** 2 for room in rooms)
    growth = -DAY_S * sum((room.at - at) * (room.free - free) for room in rooms) / spread
    return structs.replace(known, growth_bytes_per_day=growth, days_left=last.free / growth if growth > 0 else None)
