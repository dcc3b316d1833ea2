"""A case that fails in a rank is a subtest that fails, with the rank and what is wrong; a rank that dies is seen, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.rank_cases import FINISHED, CaseNotes, show_cases


class RecordedSubtests:
    """Stands in for pytest's, and keeps how each subtest ended: its error, or nothing."""

    def __init__(self) -> None:
        self.errors: dict[tuple[str, int], str] = {}

    @contextmanager
    def test(self, name: str, rank: int) -> Iterator[None]:
        self.errors[name, rank] = ""
        try:
            yield
        except AssertionError as error:
            self.errors[name, rank] = str(error).partition("\nassert")[0]


def shown(folder: Path, ranks: int) -> dict[tuple[str, int], str]:
    recorded = RecordedSubtests()
    show_cases(recorded, folder, ranks, "what the ranks printed")  # type: ignore[arg-type]
    return recorded.errors


def run(folder: Path, rank: int, *wrong: str) -> None:
    """A rank with two cases, of which the second finds `wrong`."""
    notes = CaseNotes(folder, rank)
    with notes.case("good"):
        pass
    with notes.case("other"):
        notes.wrong += wrong
    notes.finish()


def test_a_failure_names_its_case_and_its_rank(tmp_path: Path) -> None:
    run(tmp_path, 0)
    run(tmp_path, 1, "w differs", "v differs")
    errors = shown(tmp_path, 2)
    assert len(errors) == 6
    assert {key: error for key, error in errors.items() if error} == {("other", 1): "w differs\nv differs"}


def test_a_rank_that_dies_in_a_case_is_seen(tmp_path: Path) -> None:
    notes = CaseNotes(tmp_path, 0)
    with suppress(ZeroDivisionError), notes.case("divides"):
        _ = 1 / 0
    errors = shown(tmp_path, 1)
    assert "ZeroDivisionError" in errors["divides", 0]
    assert errors[FINISHED, 0] == "its last case is divides\nwhat the ranks printed"


@pytest.mark.parametrize("finishes", [False, True])
def test_a_rank_without_cases_is_seen(tmp_path: Path, finishes: bool) -> None:
    if finishes:
        CaseNotes(tmp_path, 0).finish()
    assert list(errors := shown(tmp_path, 1)) == [(FINISHED, 0)]
    assert errors[FINISHED, 0]
