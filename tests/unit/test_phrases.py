"""Sizes, ranks and lists in messages, and sizes that people write."""

from __future__ import annotations

import time

import pytest

from checkpointd.errors import UsageError
from checkpointd.phrases import byte_count, byte_size, lasting, listed, rank_runs
from checkpointd.times import utc


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (80 << 30, "80.0 GiB")])
def test_sizes_as_text(nbytes: int, text: str) -> None:
    assert byte_size(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1.0, "0 ms"), (0.04, "40 ms"), (0.9996, "1.0 s"), (7.24, "7.2 s"), (9.96, "10 s"), (600.0, "600 s")]
)
def test_lengths_of_time_as_text(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


def test_times_are_utc_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Kathmandu")
    time.tzset()
    try:
        assert utc(1_790_000_000.9) == "2026-09-21T14:13:20Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_runs_of_ranks() -> None:
    assert rank_runs([3]) == "rank 3"
    assert rank_runs([2, 0, 1, 7]) == "ranks 0-2, 7"
    assert rank_runs(range(0, 40, 2), most=3) == "ranks 0, 2, 4 and 17 more"
    assert rank_runs(range(1, 1000)) == "ranks 1-999"


def test_a_list_names_the_first_and_counts_the_others() -> None:
    assert listed([]) == ""
    assert listed(["a", "b"], 2) == "a, b"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 << 30),
        ("1.5k", 1500),
        ("10", 10),
        (7, 7),
        (" 2 MiB ", 2 << 20),
        ("3tb", 3 * 10**12),
        ("9B", 9),
        ("100PiB", 100 << 50),
    ],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert byte_count(text, "size") == expected


@pytest.mark.parametrize("text", ["", "5 apples", "-1", "0", 0, True, "1e9", "GB"])
def test_sizes_that_are_none(text: str | int) -> None:
    with pytest.raises(UsageError, match="size is"):
        byte_count(text, "size")
