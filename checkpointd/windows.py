"""Times in words, and times of day in which something may run, such as `22:00-06:00`. Nothing here has effects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from checkpointd.errors import UsageError

_SPAN = re.compile(r"(\d\d):(\d\d)-(\d\d):(\d\d)\Z", re.ASCII)
_DAY_MIN = 24 * 60


def utc(seconds: float) -> str:
    """A time in seconds since 1970 as every part of checkpointd shows it: `2026-11-28T09:30:11Z`."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class DailyWindows:
    """Spans of each day, in minutes since midnight. A span may go over midnight. Without spans, every time is inside."""

    spans: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def parse(text: str) -> DailyWindows:
        """The windows in `text`: `HH:MM-HH:MM`, several joined by commas. Raises UsageError for any other text."""
        return DailyWindows(tuple(_span(part.strip()) for part in text.split(",")) if text.strip() else ())

    def opens_in_s(self, now: datetime) -> float:
        """The seconds from the local time `now` until a window is open; 0 if one is."""
        if not self.spans:
            return 0.0
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        minute = now.hour * 60 + now.minute
        if any(_is_in(minute, span) for span in self.spans):
            return 0.0
        starts = (midnight + timedelta(days=day, minutes=start) for start, _ in self.spans for day in (0, 1))
        return min((start - now).total_seconds() for start in starts if start > now)


def _span(text: str) -> tuple[int, int]:
    match = _SPAN.match(text)
    if match is not None:
        start, stop = (int(match[at]) * 60 + int(match[at + 1]) for at in (1, 3))
        is_time = int(match[2]) < 60 and int(match[4]) < 60 and start < _DAY_MIN and stop <= _DAY_MIN
        if is_time and start != stop:
            return start, stop
    raise UsageError(f"{text!r} is no window of a day: write HH:MM-HH:MM, such as 22:00-06:00, several joined by commas")


def _is_in(minute: int, span: tuple[int, int]) -> bool:
    start, stop = span
    return start <= minute < stop if start < stop else minute >= start or minute < stop
