from __future__ import annotations

import pytest

from checkpointd.cli import formatting


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (None, "-"),
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.0KiB"),
        (1536, "1.5KiB"),
        ((1 << 20) - 1, "1.0MiB"),
        (1 << 30, "1.0GiB"),
        (5 << 40, "5.0TiB"),
        (3 << 60, "3072.0PiB"),
    ],
)
def test_sizes_have_no_blank_and_never_read_1024_of_a_unit(nbytes: int | None, text: str) -> None:
    assert formatting.size(nbytes) == text


def test_a_ratio_needs_bytes() -> None:
    assert formatting.ratio(200, 100) == "0.500"
    assert formatting.ratio(0, 0) == formatting.ratio(None, 1) == formatting.ratio(1, None) == "-"


def test_times_are_utc_to_the_second_whatever_the_zone() -> None:
    assert formatting.moment("2026-03-01T23:30:15.250+02:00") == "2026-03-01T21:30:15Z"
    assert formatting.moment("yesterday") == "yesterday"
    assert formatting.moment(None) == "-"


def test_nothing_that_a_terminal_obeys_gets_through() -> None:
    hostile = "a\x1b[2J\x07\n\u202eb\ud800"
    shown = formatting.printable(hostile)
    assert shown == r"a\x1b[2J\x07\n\u202eb\ud800"
    assert formatting.printable("módel.β") == "módel.β"


def test_a_long_text_is_cut_to_the_length_and_says_how_long_it_was() -> None:
    assert formatting.shortened("abc", 3) == "abc"
    cut = formatting.shortened("x" * 500, 60)
    assert len(cut) == 60
    assert cut.endswith("... (500 characters)")


def test_shapes_and_counts() -> None:
    assert (formatting.shape(()), formatting.shape((0, 4)), formatting.shape((7,))) == ("scalar", "0x4", "7")
    assert (formatting.count(1, "rank"), formatting.count(2, "rank"), formatting.number(None)) == ("1 rank", "2 ranks", "-")
