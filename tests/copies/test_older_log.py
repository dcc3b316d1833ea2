"""An older log, at a root that has gone on: put back in place, copied first, or after the id of the root was lost."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointd.errors import CheckpointdError
from checkpointd.layout.keys import LATEST, LOG, LOG_ROOT
from checkpointd_client import Checkpointer, open_checkpoint
from tests.copies.jobs import Run, copy_part, state


def saved(run: Run, *saves: tuple[int, str]) -> None:
    """One start that saves these steps under these tags."""
    with Checkpointer(run.root, absence_s=0.1) as ckpt:
        ckpt.load(state(-1))
        for step, tag in saves:
            run.values.setdefault(step, set()).add(float(step))
            ckpt.save(step, state(step), tag=tag).wait(60)


def put_back(root: Path, kept: Path) -> None:
    """Put the log `kept` in place of that of `root`."""
    shutil.rmtree(root / LOG)
    shutil.copytree(kept, root / LOG)


def loads(run: Run) -> int:
    run.start()
    assert run.loaded is not None
    return run.loaded.step


def moved(root: Path) -> None:
    """`latest` names what was the newest when the job ended."""


def removed(root: Path) -> None:
    (root / LATEST).unlink()


@pytest.mark.parametrize("latest", [moved, removed])
@pytest.mark.parametrize("same_start", [True, False])
def test_what_was_saved_again_under_an_older_tag_is_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, latest: Callable[[Path], None], same_start: bool
) -> None:
    run, kept = Run(tmp_path / "root"), tmp_path / "kept"
    with Checkpointer(run.root, absence_s=0.1) as ckpt:
        for step, tag in ((1, "best"), (2, "last")):
            run.values[step] = {step}
            ckpt.save(step, state(step), tag=tag).wait(60)
        shutil.copytree(run.root / LOG, kept)
        if same_start:
            run.values[3] = {3}
            ckpt.save(3, state(3), tag="best").wait(60)
    if not same_start:
        saved(run, (3, "best"))
    put_back(run.root, kept)
    latest(run.root)
    assert loads(run) == 3
    assert "an older copy is in its place" in caplog.text
    saved(run, (4, "best"))
    assert loads(run) == 4


def test_what_was_saved_again_after_the_log_was_copied_is_found_in_the_copy(tmp_path: Path) -> None:
    run = Run(tmp_path / "root")
    saved(run, (1, "best"), (2, "last"))
    copy_part(run.root, tmp_path / "copy", LOG)
    saved(run, (3, "best"))
    copy_part(run.root, tmp_path / "copy", "tags")
    assert loads(run.at(tmp_path / "copy")) == 3


def test_log_8_an_attempt_is_never_announced_over_one_that_the_log_has_lost(tmp_path: Path) -> None:
    """Log and `latest` were put back together, so nothing shows that the log is older, until its numbers are used again."""
    run, kept = Run(tmp_path / "root"), tmp_path / "kept"
    saved(run, (1, "best"), (2, "last"))
    shutil.copytree(run.root / LOG, kept)
    saved(run, (3, "best"))
    there = {path: path.read_bytes() for path in (run.root / "best" / "00000002-0").rglob("*") if path.is_file()}
    put_back(run.root, kept)
    (run.root / LATEST).write_text("last\n")
    with pytest.raises(CheckpointdError, match="an older log was put in its place"):
        saved(run, (3, "best"))
    assert all(path.read_bytes() == data for path, data in there.items())
    saved(run, (30, "best"))
    assert loads(run) == 30


def test_a_root_whose_id_is_lost_says_so_and_names_what_was_saved_under_another_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, kept = Run(tmp_path / "root"), tmp_path / "kept"
    run.start((1, 1), (2, 2))
    shutil.copytree(run.root / LOG, kept)
    (run.root / LOG_ROOT).unlink()
    run.start((3, 3), (4, 4))
    assert "the root gets a new id" in caplog.text
    put_back(run.root, kept)
    run.start()
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR and "no load takes them" in one.message]
    assert said
    assert "global_step3/00000002-0, global_step4/00000002-0" in said[0]


@pytest.mark.parametrize("lost", ["log", "entries"])
def test_log_9_a_log_is_made_again_from_ballots_if_the_files_of_votes_are_lost(tmp_path: Path, lost: str) -> None:
    """The files of votes need not be durable, so a power cut may take them."""
    run = Run(tmp_path / "root")
    run.start((1, 1), (2, 2))
    run.start((3, 3), (4, 4))
    for vote in run.root.glob("global_step[34]/*/*.vote"):
        vote.write_bytes(b"")
    if lost == "log":
        shutil.rmtree(run.root / LOG)
    else:
        for entry in sorted((run.root / LOG).glob("*.json"))[-4:]:
            entry.unlink()
    assert loads(run) == 4


@pytest.mark.nightly
def test_a_mirror_of_a_root_that_was_put_back_to_an_older_state_says_so(tmp_path: Path) -> None:
    run, mirror, kept = Run(tmp_path / "root"), tmp_path / "mirror", tmp_path / "kept"
    run.start((1, 1), (2, 2))
    shutil.copytree(run.root, kept)

    def mirrored() -> subprocess.CompletedProcess[str]:
        called = [sys.executable, "-m", "checkpointd", "mirror", str(run.root), str(mirror)]
        return subprocess.run(called, capture_output=True, text=True, check=False)

    assert mirrored().returncode == 0
    run.start((3, 3), (4, 4))
    assert mirrored().returncode == 0
    run.start((5, 5))  # a start that the mirror follows in a later run
    assert mirrored().returncode == 0
    shutil.rmtree(run.root)
    shutil.copytree(kept, run.root)
    run.start((30, 30), (31, 31))
    refused = mirrored()
    assert refused.returncode == 2
    assert "was put back to an older state" in refused.stderr


@pytest.mark.parametrize("tag", [None, LATEST])
def test_a_reader_of_the_newest_says_that_the_log_is_an_older_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tag: str | None
) -> None:
    run, kept = Run(tmp_path / "root"), tmp_path / "kept"
    saved(run, (1, "one"))
    shutil.copytree(run.root / LOG, kept)
    saved(run, (2, "two"))
    with open_checkpoint(run.root, tag) as found:
        assert found.step == 2
    assert caplog.records == []
    put_back(run.root, kept)
    with open_checkpoint(run.root, tag) as found:
        assert found.step == 1
    assert "names two, which the log does not have" in caplog.text
    assert f"`checkpointd verify {run.root}`" in caplog.text
