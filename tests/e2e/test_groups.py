"""Saves of some ranks of a job, which have a process group and a root of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.forked_ranks import run_forked
from tests.e2e.rank_cases import show_cases

SCRIPT = Path(__file__).with_name("grouped_ranks.py")


@pytest.mark.nightly
@pytest.mark.e2e
def test_each_process_group_saves_by_itself(tmp_path: Path, subtests: pytest.Subtests) -> None:
    done = run_forked(SCRIPT, tmp_path, limit_s=280)
    show_cases(subtests, tmp_path, ranks=4, output=done.stderr)
