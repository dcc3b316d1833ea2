"""Old checkpoints go when a newer one has committed."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from checkpointd_client.integrations.huggingface import rotating
from checkpointd_client.integrations.huggingface.rotating import Known, rotate
from checkpointd_client.saves.handle import Phase
from tests.unit.client.integrations.huggingface.saving_run import Run


def nothing() -> Known:
    return Known({}, set())


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_last_checkpoint_goes_when_a_newer_one_has_committed_and_not_before(run: Run) -> None:
    run.whole(10)
    run.ask(1)
    end = run.save(20)
    run.saves._rotate()
    assert (run.folder / "checkpoint-10").exists()
    end(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-20"]


def test_what_fails_takes_no_checkpoint_with_it(run: Run) -> None:
    run.whole(10)
    run.ask(1)
    run.save(20)(Phase.FAILED)
    assert run.settled() == ["checkpoint-10"]
    assert run.saves.has_failed(str(run.folder / "checkpoint-20"))
    run.save(30)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-30"]
    assert not run.saves.has_failed(str(run.folder / "checkpoint-30"))


def test_the_newest_is_that_of_the_last_save_in_whatever_order_their_ends_are_noted(run: Run) -> None:
    for number in (1, 2, 3):
        run.whole(number)
    run.ask(2)
    ends = [run.save(number) for number in (1, 2, 3)]
    with run.saves._removing:  # the rotation comes after all three
        for end in reversed(ends):
            end(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-2", "checkpoint-3"]


def test_the_order_of_the_saves_counts_and_not_that_in_which_their_files_were_written(run: Run) -> None:
    """Two saves in flight are written at one time, and the clock of another machine may have been ahead."""
    for number in (3, 2, 1, 99):
        run.whole(number)
    run.ask(2)
    with run.saves._removing:  # the rotation comes after all three
        for number in (1, 2, 3):
            run.save(number)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("is_added", [True, False])
def test_a_checkpoint_that_appears_before_the_end_of_its_save_is_noted_stays(run: Run, is_added: bool) -> None:
    """ROTATE-2. Its directory appears at the commit, and its handle ends after that."""
    run.whole(1)
    run.ask(2)
    run.save(2)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-2"]
    with run.saves.beginning(str(run.folder / "checkpoint-4")):
        end = run.save(4) if is_added else None
        run.whole(4)
        run.save(3)(Phase.COMMITTED)
        run.saves._rotate()
        assert sorted(path.name for path in run.folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
        end = end or run.save(4)
    end(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-3", "checkpoint-4"]


def test_of_files_that_were_written_at_one_time_the_number_tells_which_are_older(run: Run) -> None:
    for number in (9, 10, 11):
        checkpoint = run.whole(number)
        for file in ("trainer_state.json", "engine/mp_rank_00_model_states.pt"):
            os.utime(checkpoint / file, (7, 7))
    run.ask(2)
    run.save(11)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-10", "checkpoint-11"]


def test_a_save_elsewhere_is_waited_for_only_until_its_tensors_are_copied(run: Run, tmp_path: Path) -> None:  # ACCELERATOR-3
    """Its directory may have been removed: then it ends only at its time-out."""
    end = run.save(1)
    [handle] = run.saves._handles.values()
    threading.Timer(0, end, [Phase.STAGED]).start()
    run.saves.settle(str(tmp_path / "elsewhere"))
    assert handle.phase == "staged"
    end(Phase.COMMITTED)
    run.saves.settle(str(tmp_path))
    assert run.settled() == ["checkpoint-1"]


@pytest.mark.parametrize("lost", ["engine/mp_rank_00_model_states.pt", "trainer_state.json"])
def test_what_is_no_checkpoint_takes_no_checkpoints_place_and_stays(run: Run, lost: str) -> None:
    """A job without checkpointd that was killed while it saved; or the user has removed the engine's files, to save space."""
    run.whole(4)
    (run.whole(6) / lost).unlink()
    run.whole(8)
    run.ask(2)
    run.save(5)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-5", "checkpoint-6", "checkpoint-8"]


def test_the_newest_commit_stays_whatever_its_number_and_whoever_touches_another_directory(run: Run) -> None:
    for number in (2, 9):
        run.whole(number)
    run.ask(2)
    end = run.save(1)
    (run.folder / "checkpoint-2" / "converted.bin").touch()
    end(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-9"]


def test_only_names_that_the_library_gives_are_rotated(run: Run) -> None:
    for number in range(3):
        run.whole(number, name="checkpoint_{}")
    run.whole(1, name="checkpoint_best_{}")
    run.ask(1, names=r"checkpoint_\d+")
    run.save(7)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-7", "checkpoint_2", "checkpoint_best_1"]


def test_a_rotation_that_is_cut_off_or_done_twice_takes_no_newer_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU each rank takes itself for the first one of its node, and rotates."""

    def half(path: os.PathLike[str], **_: object) -> None:
        for found in Path(path).glob("*/trainer_state.json"):
            found.unlink()

    for number in range(3):
        run.whole(number)
    run.ask(2)
    [limit] = run.saves._limits.values()
    monkeypatch.setattr(shutil, "rmtree", half)
    for _ in range(2):
        rotate(str(run.folder), limit, None, nothing)
        assert run.settled() == ["checkpoint-1", "checkpoint-2"]
    monkeypatch.setattr(os, "rename", gone)  # to another rank that was faster
    run.whole(3)
    rotate(str(run.folder), limit, None, nothing)
    assert run.settled() == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def gone(*_: object) -> None:
    raise FileNotFoundError


def test_what_cannot_be_removed_is_said(run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(os, "rename", refused)
    run.whole(1)
    run.ask(1)
    run.save(2)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-2"]
    assert "checkpoint-1 is no longer needed and cannot be removed: not yours" in caplog.text


def test_what_goes_is_not_removed_on_the_thread_that_ends_the_save(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """All other saves wait for that thread, and the lease of the job."""
    on: list[threading.Thread] = []
    run.ask(1)
    begun = threading.Event()
    monkeypatch.setattr(rotating, "rotate", lambda *_: (on.append(threading.current_thread()), begun.set()))
    run.save(2)(Phase.COMMITTED)
    assert begun.wait(30)
    assert on != [threading.current_thread()]


@pytest.mark.parametrize("engines", [None, "*/*_states.pt"])
def test_the_age_is_that_of_an_engines_files_if_one_takes_part(run: Run, engines: str | None) -> None:
    """ROTATE-2."""
    old, new = run.whole(2), run.whole(1)
    os.utime(old / "trainer_state.json", (10, 10))
    run.ask(1, engines=engines)
    [limit] = run.saves._limits.values()
    rotate(str(run.folder), limit, None, nothing)
    assert run.settled() == [old.name if engines is None else new.name]
