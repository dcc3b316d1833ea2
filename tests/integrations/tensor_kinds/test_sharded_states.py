"""Torchao's low-bit states under FSDP2, saved by N ranks and loaded by M, whose states are of other classes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.tensor_kinds.jobs import run

pytest.importorskip("torchao.optim", reason="needs torchao: make test-all installs it")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
JOB = Path(__file__).parent / "sharded_job.py"


def job(ranks: int, what: str, name: str, folder: Path) -> None:
    run(JOB, ranks, str(folder / "root"), name, what, after=(str(folder / "reference"),))


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_two_ranks_are_resumed_exactly_and_load_on_one_and_on_four(name: str, tmp_path: Path) -> None:
    job(2, "save", name, tmp_path)
    job(2, "resume", name, tmp_path)
    for ranks in (1, 4):
        job(ranks, "compare", name, tmp_path)


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (4, 2)])
def test_states_of_one_and_of_four_ranks_load_on_two(saved: int, loaded: int, tmp_path: Path) -> None:
    job(saved, "save", "AdamW8bit", tmp_path)
    job(loaded, "compare", "AdamW8bit", tmp_path)
