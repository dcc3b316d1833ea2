"""What Hugging Face's Trainer does to directories, as long as a save is not yet a checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install checkpointd[deepspeed]")

from checkpointd.errors import NotFoundError, UsageError
from checkpointd.pipeline.shard import Progress
from checkpointd_client.handle import Phase, SaveHandle
from checkpointd_client.integrations.deepspeed import install, trainers
from checkpointd_client.integrations.deepspeed.filling import Filled, Filling, current
from checkpointd_client.integrations.deepspeed.plug import own_root
from checkpointd_client.integrations.deepspeed.trainers import Rotation, Saves, _loading_state, keep_newest, watch


def by_number(output_dir: str, save_total_limit: int) -> None:
    """As transformers does it: of what is there, the oldest go."""
    found = sorted(Path(output_dir).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    for path in found[:-save_total_limit]:
        shutil.rmtree(path)


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder, self.saves = folder, Saves()
        self.rotate = Rotation(by_number)
        self.saves.add_rotation(self.rotate)

    def save(self, step: int, limit: int = 1) -> Callable[[Phase], None]:
        """Save as the Trainer does, and rotate; what it gives ends the save."""
        directory = self.folder / f"checkpoint-{step}"
        handle = SaveHandle(f"global_step{step}", "00000001-0", step, Progress())
        self.saves.add(str(directory), handle)
        self.rotate(str(self.folder), limit)

        def end(phase: Phase) -> None:
            if phase is Phase.COMMITTED:
                directory.mkdir()
            handle.advance(phase)

        return end

    @property
    def left(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("checkpoint-*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_last_checkpoint_goes_when_a_newer_one_has_committed_and_not_before(run: Run) -> None:
    run.save(10)(Phase.COMMITTED)
    end = run.save(20)
    assert run.left == [10]
    end(Phase.COMMITTED)
    assert run.left == [20]


def test_what_fails_takes_no_checkpoint_with_it(run: Run) -> None:
    run.save(10)(Phase.COMMITTED)
    run.save(20)(Phase.FAILED)
    assert run.left == [10]
    assert run.saves.has_failed(str(run.folder / "checkpoint-20"))
    run.save(30)(Phase.COMMITTED)
    assert run.left == [30]
    assert not run.saves.has_failed(str(run.folder / "checkpoint-30"))


def test_accelerates_rotation_goes_by_age(tmp_path: Path) -> None:
    """A job that goes on may count from 0 again."""
    for age, name in enumerate(("checkpoint_9", "checkpoint_10", "checkpoint_0", "checkpoint_best", "other")):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (age, age))
    keep_newest(str(tmp_path), 2, str(tmp_path / "hidden"))
    assert left_in(tmp_path) == ["checkpoint_0", "checkpoint_10", "checkpoint_best", "other"]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "hidden")


def test_accelerates_rotation_that_is_cut_off_or_done_twice_takes_no_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU each rank takes itself for the first one of its node, and rotates."""
    for age in range(3):
        (tmp_path / f"checkpoint_{age}").mkdir()
        (tmp_path / f"checkpoint_{age}" / "latest").touch()
        (tmp_path / f"checkpoint_{age}" / "model.safetensors").touch()
        os.utime(tmp_path / f"checkpoint_{age}", (age, age))

    def half(path: os.PathLike[str], **_: object) -> None:
        for found in sorted(Path(path).glob("**/latest")):
            found.unlink()

    monkeypatch.setattr(shutil, "rmtree", half)
    for _ in range(2):
        keep_newest(str(tmp_path), 2, str(tmp_path / "hidden"))
        assert left_in(tmp_path) == ["checkpoint_1", "checkpoint_2"]
    monkeypatch.setattr(Path, "rename", gone)  # to another rank that was faster
    (tmp_path / "checkpoint_3").mkdir()
    keep_newest(str(tmp_path), 2, str(tmp_path / "hidden"))
    assert left_in(tmp_path) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def gone(*_: object) -> None:
    raise FileNotFoundError


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> Saves:
    made = Saves()
    monkeypatch.setattr(trainers, "_SAVES", made)
    return made


def test_a_directory_without_a_checkpoint_takes_no_checkpoints_place(saves: Saves, tmp_path: Path) -> None:
    """Such as one that a callback writes to before the commit, or that an earlier job has left half made."""
    (tmp_path / "checkpoint-4" / "global_step4").mkdir(parents=True)
    (tmp_path / "checkpoint-8").mkdir()
    rotate = trainers._rotating(lambda output_dir, save_total_limit, **_: by_number(output_dir, save_total_limit))
    rotate(str(tmp_path), 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-8"]


def test_the_best_checkpoint_stays_until_a_better_one_has_committed(saves: Saves, tmp_path: Path) -> None:
    for step in (4, 6):
        (tmp_path / f"checkpoint-{step}" / f"global_step{step}").mkdir(parents=True)
    asked: list[tuple[int, str | None]] = []

    def original(_: str, *, save_total_limit: int, best_model_checkpoint: str | None) -> None:
        asked.append((save_total_limit, best_model_checkpoint))

    best, better = str(tmp_path / "checkpoint-4"), str(tmp_path / "checkpoint-8")
    saves.best, handle = best, SaveHandle("global_step8", "00000001-0", 8, Progress())
    saves.add(better, handle)
    rotate = trainers._rotating(original)
    rotate(str(tmp_path), 1, best_model_checkpoint=better)
    assert asked == []
    handle.advance(Phase.ABORTED)
    assert asked == [(1, best)]

    class Training:
        """A Trainer at its end."""

        state = SimpleNamespace(best_model_checkpoint=better)

    trainers._finalizing(lambda training: asked.append((0, training.state.best_model_checkpoint)))(Training())
    assert asked[-1] == (0, best)


@pytest.mark.parametrize(
    ("error", "is_its_own"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (RuntimeError("[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing file data/0"), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (TypeError("Object of type Path is not JSON serializable"), False),
    ],
)
def test_what_the_storage_refuses_fails_the_save_alone(tmp_path: Path, error: Exception, is_its_own: bool) -> None:
    filling = Filling(str(tmp_path / "checkpoint-1"), Filled("00000001-0", str(tmp_path / "elsewhere" / "checkpoint-1")))

    def fill() -> None:
        with filling.active():
            assert current() is filling
            with filling.keeping():
                raise error

    if is_its_own:
        fill()
        assert str(error) in str(filling.filled.fault)
    else:
        with pytest.raises(type(error)):
            fill()
        assert not (tmp_path / "elsewhere").exists(), "what was filled goes with whoever filled it"
    assert current() is None


def test_the_other_layout_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="checkpoint-N directories that hold DeepSpeed's files"):
        install(layout="checkpointd")


def test_accelerate_is_told_of_a_missing_checkpoint_by_an_error_and_others_as_deepspeed_tells_it() -> None:
    plug: Any = None  # nothing is saved here

    class Engine:
        def save_checkpoint(self, save_dir: str) -> None: ...

        def load_checkpoint(self, load_dir: str) -> tuple[str | None, dict[str, object] | None]:
            return (load_dir, {}) if load_dir == "there" else (None, None)

    engine = Engine()
    watch(engine, plug)
    load_state = _loading_state(lambda _accelerator, input_dir: engine.load_checkpoint(input_dir))
    with pytest.raises(NotFoundError, match="no checkpoint was committed in elsewhere"):
        load_state(None, "elsewhere")
    assert load_state(None, "there") == ("there", {})
    assert engine.load_checkpoint("elsewhere") == (None, None)


@pytest.mark.parametrize(
    ("folder", "root"),
    [
        ("/runs/a", "/runs/a"),
        ("/runs/a/checkpoint-30", "/runs/a"),
        ("/runs/a/checkpoints/checkpoint_3", "/runs/a"),
        ("/runs/a/checkpoints", "/runs/a/checkpoints"),
        ("/runs/a/checkpoint-best", "/runs/a/checkpoint-best"),
    ],
)
def test_whose_store_is_where(folder: str, root: str) -> None:
    assert own_root(folder) == root
