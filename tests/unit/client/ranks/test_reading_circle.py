"""Which ranks form circles. (Circles of real ranks: tests/e2e/test_shared_reads.py.)"""

from __future__ import annotations

import pytest

from checkpointd_client.ranks import reading_circle
from checkpointd_client.ranks.reading_circle import circles_of


def test_ranks_that_read_the_same_form_a_circle() -> None:
    assert circles_of({3: "a", 0: "a", 1: "b", 2: "b", 4: "c"}).circles == ((0, 3), (1, 2))


def test_ranks_that_decline_are_in_none() -> None:
    assert circles_of({0: "", 1: "", 2: "a", 3: "a"}).circles == ((2, 3),)


def test_a_circle_has_no_more_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_circle, "SIZE_MAX", 2)
    assert circles_of(dict.fromkeys(range(5), "a")).circles == ((0, 1), (2, 3))


def test_circles_of_two_loads_have_different_tokens() -> None:
    assert circles_of({0: "a", 1: "a"}).token != circles_of({0: "a", 1: "a"}).token
