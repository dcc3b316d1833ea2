"""Times of day, as text and as seconds to wait."""

from __future__ import annotations

from datetime import datetime

import pytest

from checkpointd.errors import UsageError
from checkpointd.windows import DailyWindows


def at(hour: int, minute: int = 0, second: int = 0) -> datetime:
    return datetime(2026, 5, 17, hour, minute, second)


def test_without_windows_every_time_is_inside() -> None:
    assert DailyWindows.parse("").opens_in_s(at(12)) == 0.0
    assert DailyWindows.parse("  ") == DailyWindows()


@pytest.mark.parametrize(
    ("now", "left_s"),
    [
        (at(22), 0.0),
        (at(23, 59, 59), 0.0),
        (at(0), 0.0),
        (at(5, 59, 59), 0.0),
        (at(6), 16 * 3600.0),
        (at(21, 59, 30), 30.0),
        (at(12), 10 * 3600.0),
    ],
)
def test_a_window_may_go_over_midnight(now: datetime, left_s: float) -> None:
    assert DailyWindows.parse("22:00-06:00").opens_in_s(now) == left_s


def test_the_next_of_several_windows_counts() -> None:
    windows = DailyWindows.parse("22:00-06:00, 12:00-13:30")
    assert windows.opens_in_s(at(11)) == 3600.0
    assert windows.opens_in_s(at(13, 29)) == 0.0
    assert windows.opens_in_s(at(13, 30)) == 8.5 * 3600.0


def test_the_first_window_of_tomorrow_counts_too() -> None:
    assert DailyWindows.parse("01:00-02:00").opens_in_s(at(23)) == 2 * 3600.0


def test_the_end_of_the_day_is_a_time() -> None:
    assert DailyWindows.parse("20:00-24:00").opens_in_s(at(23, 59)) == 0.0


@pytest.mark.parametrize(
    "text", ["22-06", "22:00", "22:00-22:00", "25:00-26:00", "22:60-23:00", "22:00-24:01", "22:00-06:00,", "a", "-1:00-02:00"]
)
def test_any_other_text_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="is no window of a day: write HH:MM-HH:MM"):
        DailyWindows.parse(text)
