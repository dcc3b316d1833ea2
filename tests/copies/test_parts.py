"""Copies of which a part is missing or older: a start never takes an older or another state without a word."""

from __future__ import annotations

import itertools
import logging
import shutil
from pathlib import Path

import pytest

from checkpointd.errors import DamagedError
from checkpointd.layout.keys import LOG
from checkpointd_client import Checkpointer
from tests.copies.jobs import PARTS, Run, copy_part

OLD, NEW = 3, 6
"""The newest steps of the two moments at which parts are copied."""
AGES = ("new", "old", "missing")
COMBINATIONS = list(itertools.product(AGES, repeat=len(PARTS)))
LIKELY = [
    ("old", "new", "new", "new"),
    ("missing", "new", "new", "new"),
    ("old", "new", "old", "old"),
    ("missing", "new", "missing", "missing"),
    ("new", "old", "new", "new"),
    ("new", "new", "missing", "missing"),
    ("new", "missing", "new", "new"),
]


@pytest.fixture(scope="module", params=["in one start", pytest.param("in two starts", marks=pytest.mark.nightly)])
def moments(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Run]:
    """A root as it was after the step OLD, and after NEW, and what was saved there. One tag is saved at each step."""
    path = tmp_path_factory.mktemp("moments")
    job = Run(path / "root")
    with Checkpointer(job.root) as ckpt:
        for step in range(1, OLD + 1):
            job.save(ckpt, step, again="last")
        if request.param == "in one start":
            shutil.copytree(job.root, path / "old")
            for step in range(OLD + 1, NEW + 1):
                job.save(ckpt, step, again="last")
    if request.param == "in two starts":
        shutil.copytree(job.root, path / "old")
        job.start(*((step, step) for step in range(OLD + 1, NEW + 1)), again="last")
    return path / "old", job.root, job


def check(ages: tuple[str, ...], moments: tuple[Path, Path, Run], root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Load at the copy, save steps that the copy may have already, with other values, and load again."""
    root.mkdir()
    for part, age in zip(PARTS, ages, strict=True):
        if age != "missing":
            copy_part(moments[0] if age == "old" else moments[1], root, part)
    of = dict(zip(PARTS, ages, strict=True))
    there = {"new": NEW, "old": OLD, "missing": 0}[of["tags"]]
    job = moments[2].at(root)
    if not there and of[LOG] != "missing":
        with pytest.raises(DamagedError, match="no whole checkpoint is left"):
            job.start()
        return
    job.start()
    assert (0 if job.loaded is None else job.loaded.step) == there
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    if of["tags"] == "old" and of[LOG] == "new":
        assert job.loaded is not None
        assert any(f"global_step{NEW}" in one or "last/" in one for one in job.loaded.fell_back_from), (
            "it says that it is older"
        )
    if there and of[LOG] == "missing":
        assert any("the log of" in one and "is gone" in one for one in said)
    if of["tags"] == "new" and of[LOG] == "old":
        assert any("an older copy is in its place" in one for one in said)
    job.at(root).start(*((step, step + 0.5) for step in (OLD + 1, NEW + 1)), again="last")
    assert job.at(root).start().value == NEW + 1.5
    assert job.at(root).start(tag=f"global_step{OLD + 1}").value == OLD + 1.5
    assert job.at(root).start(tag="last").value == NEW + 1.5


@pytest.mark.parametrize("ages", LIKELY, ids=" ".join)
def test_a_part_is_missing_or_older(
    ages: tuple[str, ...], moments: tuple[Path, Path, Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(ages, moments, tmp_path / "copy", caplog)


@pytest.mark.nightly
@pytest.mark.parametrize("ages", [one for one in COMBINATIONS if one not in LIKELY], ids=" ".join)
def test_any_part_is_missing_or_older(
    ages: tuple[str, ...], moments: tuple[Path, Path, Run], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check(ages, moments, tmp_path / "copy", caplog)
