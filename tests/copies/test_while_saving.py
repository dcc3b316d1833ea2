"""Copies of a root in use, roots that go back to a snapshot, and checkpoints that somebody takes away and brings back."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from checkpointd.cli import run as cli
from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError, UsageError
from checkpointd.layout.keys import LATEST, LOG
from checkpointd_client import Checkpointer, Retention, list_checkpoints, open_checkpoint
from tests.copies.jobs import PARTS, Run, copy_part, state

ORDERS = list(itertools.permutations(PARTS))

pytestmark = pytest.mark.usefixtures("short_looks")


# --- copies ---------------------------------------------------------------------------------------------------------


def copied(job: Run, copy: Path, order: tuple[str, ...], first: int) -> int:
    """Copy the parts in this order, while the job saves between any two of them. Returns the newest step of the tags."""
    there = 0
    with Checkpointer(job.root, retention=job.retention) as ckpt:
        ckpt.load(state(-1))
        for step, part in enumerate(order, first):
            job.save(ckpt, step, again="last")
            copy_part(job.root, copy, part)
            there = step if part == "tags" else there
        job.save(ckpt, first + len(order), again="last")
    return there


@pytest.mark.parametrize("order", [ORDERS[-1]], ids=" ".join)
def test_parts_copied_in_any_order_give_the_newest_that_is_whole(order: tuple[str, ...], tmp_path: Path) -> None:
    copies_load(order, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_parts_copied_in_every_order(order: tuple[str, ...], tmp_path: Path) -> None:
    copies_load(order, tmp_path)


def copies_load(order: tuple[str, ...], path: Path) -> None:
    """Also twice into the same place, over what is there."""
    job, copy = Run(path / "root"), path / "copy"
    for first in (1, 11):
        there = copied(job, copy, order, first)
        once = Path(shutil.copytree(copy, path / f"once{first}"))
        found = job.at(once).start()
        assert found.loaded is not None
        assert found.loaded.step == there
        assert (found.loaded.fell_back_from != ()) == (order.index(LOG) > order.index("tags"))
        job.at(once).start((first + 1, first + 1.5), again="last")
        assert job.at(once).start().value == first + 1.5


def test_a_copy_over_an_older_one_beside_a_job_that_removes(tmp_path: Path) -> None:
    """Without deleting what the job has removed since: states and entries of two moments, and directories that no log names."""
    job, copy = Run(tmp_path / "root", retention=Retention(keep_last=2)), tmp_path / "copy"
    with Checkpointer(job.root, retention=job.retention, afresh=True) as ckpt:
        for first in (1, 101):
            for step in range(first, first + 40):
                job.save(ckpt, step)
            ckpt.wait()
            for part in PARTS:
                copy_part(job.root, copy, part)
    assert cli(["verify", str(copy), "--copy-of", str(job.root)]) == 0
    found = job.at(copy).start((201, 201.0))
    assert found.loaded is not None
    assert (found.loaded.step, found.loaded.fell_back_from) == (140, ())
    assert [one.step for one in list_checkpoints(copy)][:1] == [201]
    assert (copy / "global_step40").exists(), "no command removes what the log does not name"


@pytest.fixture
def saved(tmp_path: Path) -> Run:
    """Steps 1 to 5, of which the last two stay, and a copy of the root with its first three."""
    job = Run(tmp_path / "root")
    with Checkpointer(job.root) as ckpt:
        for step in (1, 2, 3):
            job.save(ckpt, step)
    shutil.copytree(job.root, tmp_path / "copy")
    job.start((4, 4.0), (5, 5.0))
    return job


def test_verify_knows_what_the_original_has_removed_since(
    saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, verify = tmp_path / "copy", ["verify", str(tmp_path / "copy"), "--copy-of", str(saved.root)]
    assert cli(verify) == 0
    (copy / "global_step2/00000001-0/00000-0.chunks").unlink()
    assert (cli(verify), cli(verify[:2])) == (5, 5), "it is at the original"
    assert cli(["delete", str(saved.root), "global_step2", "--yes"]) == 0
    capsys.readouterr()
    assert cli(verify) == 0
    assert "global_step2  00000001-0  removed" in capsys.readouterr().out
    assert cli(verify[:2]) == 5
    assert cli(["delete", str(saved.root), "global_step3", "--yes"]) == 0
    (copy / "global_step3/00000001-0/00000-0.chunks").unlink()
    assert cli(verify) == 5, "the copy gives no longer what its log calls the newest"


def test_verify_refuses_an_original_that_is_none(saved: Run, tmp_path: Path) -> None:
    Run(tmp_path / "other").start((1, 1.0))
    for other in (tmp_path / "other", tmp_path / "copy"):
        assert cli(["verify", str(saved.root), "--copy-of", str(other)]) == UsageError.exit_code


# --- snapshots ------------------------------------------------------------------------------------------------------


def go_back(root: Path, snapshot: Path) -> None:
    """Put back what was there, in the same directory."""
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(snapshot, root, dirs_exist_ok=True)


@pytest.mark.parametrize("saves", [1, pytest.param(40, marks=pytest.mark.nightly)])
def test_a_root_that_goes_back_to_a_snapshot_under_a_job(saves: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said. The next save refers to nothing that is not there any more, and all goes on from the snapshot."""
    job = Run(tmp_path / "root")
    with Checkpointer(job.root, commit_timeout_s=20) as ckpt:
        job.save(ckpt, 1)
        shutil.copytree(job.root, tmp_path / "snapshot")
        for step in range(2, 2 + saves):
            job.save(ckpt, step)
        ckpt.wait()
        go_back(job.root, tmp_path / "snapshot")
        job.save(ckpt, 90)
        assert any("or put an older copy of the log in its place" in one.getMessage() for one in caplog.records)
        assert [one.step for one in ckpt.list()] == [90, 1]
    assert cli(["verify", str(job.root)]) == 0
    found = job.at(job.root).start((91, 91.5))
    assert found.loaded is not None
    assert (found.loaded.step, found.loaded.fell_back_from) == (90, ())
    assert job.at(job.root).start().value == 91.5


def test_a_root_that_goes_back_to_a_snapshot_between_two_starts(saved: Run, tmp_path: Path) -> None:
    """The same names are used again, with nothing left of what they meant."""
    go_back(saved.root, tmp_path / "copy")
    found = saved.start((4, 4.5), (5, 5.5))
    assert found.loaded is not None
    assert found.loaded.step == 3
    assert saved.at(saved.root).start().value == 5.5


# --- parts of the log -----------------------------------------------------------------------------------------------


LOST = {
    "the newest entry": lambda names: names[-1:],
    "the last ten entries": lambda names: names[-10:],
    "an entry in the middle": lambda names: names[-20:-19],
    "all entries": lambda names: [one for one in names if one.endswith(".json")],
    "all states": lambda names: [one for one in names if one.endswith(".state")],
    "the id": lambda _: ["root"],
    "all": lambda names: [*names, "root"],
}


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A root with entries and two states."""
    job = Run(tmp_path_factory.mktemp("long") / "root")
    with Checkpointer(job.root, read_back=False) as ckpt:
        for step in range(1, 71):
            job.save(ckpt, step)
    return job


@pytest.mark.nightly
@pytest.mark.parametrize("lost", LOST)
def test_what_a_start_loads_when_parts_of_the_log_are_gone(lost: str, long: Run, tmp_path: Path) -> None:
    root = Path(shutil.copytree(long.root, tmp_path / "root"))
    names = sorted(path.name for path in (root / LOG).iterdir() if path.name != "root")
    assert sum(one.endswith(".state") for one in names) == 2
    for name in LOST[lost](names):
        (root / LOG / name).unlink()
    found = long.at(root).start((71, 71.5))
    assert found.loaded is not None
    assert (found.loaded.step, found.loaded.fell_back_from) == (70, ())
    assert {one.step for one in list_checkpoints(root)} >= set(range(1, 72))
    assert long.at(root).start().value == 71.5


# --- taken away and brought back ------------------------------------------------------------------------------------


def test_a_checkpoint_that_is_taken_away_and_brought_back(saved: Run, tmp_path: Path) -> None:
    away = tmp_path / "away"
    (saved.root / "global_step5").rename(away)
    found = saved.at(saved.root).start()
    assert found.loaded is not None
    assert found.loaded.step == 4
    assert "global_step5" in found.loaded.fell_back_from[0]
    with pytest.raises(DamagedError, match="somebody removed global_step5"):
        open_checkpoint(saved.root, "global_step5", absence_s=0.1)
    away.rename(saved.root / "global_step5")
    found = saved.at(saved.root).start()
    assert found.loaded is not None
    assert (found.loaded.step, found.loaded.fell_back_from) == (5, ())
    assert cli(["verify", str(saved.root)]) == 0


@pytest.mark.nightly
def test_one_that_was_deleted_and_is_brought_back_stays_and_is_none(
    saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The log says that it was removed. Nothing removes it once more, and `verify` names it."""
    shutil.copytree(saved.root / "global_step2", tmp_path / "away")
    assert cli(["delete", str(saved.root), "global_step2", "--yes"]) == 0
    shutil.copytree(tmp_path / "away", saved.root / "global_step2")
    for retention, steps in ((1, range(6, 76)), (None, range(76, 79))):
        job = Run(saved.root, retention, values=saved.values)
        job.start(*((step, float(step)) for step in steps))
        with pytest.raises(NotFoundError, match="global_step2"):
            open_checkpoint(saved.root, "global_step2")
    assert sorted(path.name for path in (saved.root / "global_step2").rglob("*.*")) == sorted(
        path.name for path in (tmp_path / "away").rglob("*.*")
    )
    capsys.readouterr()
    assert cli(["verify", str(saved.root)]) == 0
    assert "global_step2/00000001-0: somebody brought them here" in capsys.readouterr().out


# --- the tag of `latest`, and tags that are saved again --------------------------------------------------------------


def test_the_tag_of_latest_is_gone(saved: Run) -> None:
    assert (saved.root / LATEST).read_text() == "global_step5\n"
    shutil.rmtree(saved.root / "global_step5")
    found = saved.at(saved.root).start()
    assert found.loaded is not None
    assert (found.loaded.step, "global_step5" in found.loaded.fell_back_from[0]) == (4, True)
    with Checkpointer(saved.root, absence_s=0.1) as ckpt, pytest.raises(DamagedError, match="global_step5"):
        ckpt.load(state(-1), fallback=False)
    assert cli(["verify", str(saved.root)]) == 5


def test_a_tag_that_is_saved_again_while_it_is_read(tmp_path: Path) -> None:
    """What was opened is read as it was, or it is said that it was removed: never damage, never parts of two saves."""
    job = Run(tmp_path / "root", retention=1)
    with Checkpointer(job.root, retention=1, dedup=False) as ckpt:
        job.save(ckpt, 1, again="last")
        with open_checkpoint(job.root, "last", absence_s=0.1) as opened:
            for step in (2, 3, 4):
                job.save(ckpt, step, again="last")
            ckpt.wait()
            with suppress(NotFoundError):
                assert opened.tensor("w").unique().tolist() == [float(opened.step)]
        with open_checkpoint(job.root, "last") as opened:
            assert opened.tensor("w").unique().tolist() == [4.0]


# --- two spellings of one root ---------------------------------------------------------------------------------------


@pytest.fixture
def other_spelling(saved: Run, tmp_path: Path) -> Path:
    (tmp_path / "link").symlink_to(tmp_path)
    return tmp_path / "link" / "root"


@pytest.mark.nightly
@pytest.mark.parametrize("same_process", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_one_job_at_a_time_whatever_the_root_is_called(same_process: bool, saved: Run, other_spelling: Path) -> None:
    with Checkpointer(saved.root) as ckpt:
        if same_process:
            with pytest.raises(CheckpointdError):
                Checkpointer(other_spelling)
        else:
            code = f"from checkpointd_client import Checkpointer; Checkpointer({str(other_spelling)!r}, job='other')"
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert "RootInUseError" in done.stderr
        ckpt.load(state(-1))
        saved.save(ckpt, 6)
