"""What Hugging Face's Trainer does to directories, as long as a save is not yet a checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install checkpointd[deepspeed]")

from checkpointd.errors import NotFoundError, UsageError
from checkpointd.pipeline.shard import ShardProgress
from checkpointd_client.integrations.deepspeed import install
from checkpointd_client.integrations.deepspeed.adapter_base import own_root
from checkpointd_client.integrations.deepspeed.huggingface import rotating, trainers
from checkpointd_client.integrations.deepspeed.huggingface.filling import Filled, Filling, current
from checkpointd_client.integrations.deepspeed.huggingface.rotating import Limit, Saves, rotate
from checkpointd_client.integrations.deepspeed.huggingface.trainers import _loading_state, watch
from checkpointd_client.saves.handle import Phase, SaveHandle


class Run:
    """A directory to which a Trainer saves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.saves, self._age = folder, Saves(), 0

    def whole(self, number: int, *, name: str = "checkpoint-{}") -> Path:
        """A checkpoint that is there, younger than those before."""
        path = self.folder / name.format(number)
        (path / "engine").mkdir(parents=True)
        self._age += 1
        for file in ("trainer_state.json", "engine/mp_rank_00_model_states.pt"):
            (path / file).touch()
            os.utime(path / file, (self._age, self._age))
        return path

    def ask(self, keep: int, *, best: int | None = None, names: str = r"checkpoint-\d+") -> None:
        """What the Trainer asks for when it saves."""
        better = None if best is None else str(self.folder / f"checkpoint-{best}")
        limit = Limit(keep, names, "trainer_state.json", str(self.folder / "hidden"), better)
        self.saves.limit(str(self.folder), limit)

    def save(self, number: int) -> Callable[[Phase], None]:
        """Begin a save; what it gives ends it."""
        directory = self.folder / f"checkpoint-{number}"
        handle = SaveHandle(f"global_step{number}", "00000001-0", number, ShardProgress())
        self.saves.add(str(directory), handle)

        def end(phase: Phase) -> None:
            if phase is Phase.COMMITTED and not directory.exists():
                self.whole(number)
            handle.advance(phase)

        return end

    def settled(self) -> list[str]:
        self.saves.settle()
        return sorted(path.name for path in self.folder.iterdir() if path.name != "hidden")


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
        rotate(str(run.folder), limit, set())
        assert run.settled() == ["checkpoint-1", "checkpoint-2"]
    monkeypatch.setattr(os, "rename", gone)  # to another rank that was faster
    run.whole(3)
    rotate(str(run.folder), limit, set())
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


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> Saves:
    made = Saves()
    monkeypatch.setattr(trainers, "_SAVES", made)
    return made


def test_the_limit_of_one_training_is_none_of_the_next(run: Run, saves: Saves) -> None:
    run.saves = saves
    run.whole(1)
    run.ask(1)
    saves.note_best(str(run.folder), str(run.folder / "checkpoint-1"))
    trainers._training(lambda: None)()
    assert saves.best(str(run.folder)) is None
    run.save(2)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-2"]
    run.ask(1)
    run.ask(0)  # no limit any more
    run.save(3)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_what_does_not_go_through_an_engine_is_rotated_as_ever(tmp_path: Path, saves: Saves) -> None:
    asked: list[tuple[object, ...]] = []
    rotate_checkpoints = trainers._rotating(lambda *args, **options: asked.append((args, options)))
    rotate_checkpoints(str(tmp_path), 1, use_mtime=True)
    assert asked == [((str(tmp_path), 1), {"use_mtime": True})]


def test_a_save_on_sigterm_makes_no_directory_that_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer's own way makes checkpoint-3 first; with an engine that is not attached it stays so."""
    done: list[str] = []

    class Engine:
        """One that is attached."""

    class Plugged:
        is_attached = True

    engine = Engine()
    monkeypatch.setitem(trainers._PLUGS, engine, Plugged())
    save_at_once = trainers._saving_at_once(lambda _: done.append("as ever"))
    for at, only_model in ((engine, False), (engine, True), (Engine(), False), (None, False)):
        trainer = SimpleNamespace(
            args=SimpleNamespace(save_only_model=only_model),
            deepspeed=at,
            model="model",
            _save_checkpoint=lambda model, **_: done.append(model),
        )
        manager = SimpleNamespace(trainer=trainer, is_checkpoint_requested=True)
        save_at_once(manager)
        assert manager.is_checkpoint_requested == (done[-1] == "as ever")
    assert done == ["model", "as ever", "as ever", "as ever"]


def test_the_best_checkpoint_stays_until_a_better_one_has_committed(run: Run, saves: Saves) -> None:
    run.saves = saves
    for number in (4, 5):
        run.whole(number)
    best, better = str(run.folder / "checkpoint-4"), str(run.folder / "checkpoint-8")
    saves.note_best(str(run.folder), best)
    run.ask(1, best=8)
    end_of_the_better = run.save(8)
    run.save(6)(Phase.COMMITTED)
    saves._rotate()
    assert (run.folder / "checkpoint-5").exists()
    end_of_the_better(Phase.ABORTED)
    assert run.settled() == ["checkpoint-4", "checkpoint-6"]

    class Training:
        """A Trainer at its end."""

        state = SimpleNamespace(best_model_checkpoint=better)

    ended: list[str | None] = []
    trainers._finalizing(lambda training: ended.append(training.state.best_model_checkpoint))(Training())
    assert ended == [best]


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
        ("/mnt/checkpoints/checkpoint-3", "/mnt/checkpoints"),
        ("/runs/a/checkpoints", "/runs/a/checkpoints"),
        ("/runs/a/checkpoint-best", "/runs/a/checkpoint-best"),
    ],
)
def test_whose_store_is_where(folder: str, root: str) -> None:
    assert own_root(folder) == root
