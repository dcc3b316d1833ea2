"""What Hugging Face's Trainer does to directories, as long as a save is not yet a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs deepspeed: pip install checkpointd[deepspeed]")

from checkpointd.errors import NotFoundError
from checkpointd.pipeline.shard import Progress
from checkpointd_client.handle import Phase, SaveHandle
from checkpointd_client.integrations.deepspeed.plug import own_root
from checkpointd_client.integrations.deepspeed.trainers import Rotation, Saves, _last, _loading_state, watch


def by_age(output_dir: str, save_total_limit: int, **_: object) -> None:
    """As transformers does it: the oldest go, by the age of their directories."""
    found = sorted(Path(output_dir).glob("checkpoint-*"), key=os.path.getmtime)
    for path in found[:-save_total_limit]:
        shutil.rmtree(path)


class Run:
    def __init__(self, folder: Path) -> None:
        self.folder, self.saves = folder, Saves()
        self.rotate = Rotation(by_age, self.saves)
        self.saves.add_rotation(self.rotate)
        self._now = 1_000_000

    def save(self, step: int, limit: int = 1) -> Callable[[Phase], None]:
        """Save as the Trainer does, and rotate; what it gives ends the save."""
        directory = self.folder / f"checkpoint-{step}"
        directory.mkdir()
        self.touch(directory)
        handle = SaveHandle(f"global_step{step}", "00000001-0", step, Progress())
        self.saves.add(str(directory), handle)
        self.rotate(str(self.folder), limit)

        def end(phase: Phase) -> None:
            if phase is Phase.COMMITTED:
                (directory / f"global_step{step}").mkdir()
                self.touch(directory)
            handle.advance(phase)

        return end

    def touch(self, path: Path) -> None:
        self._now += 10
        os.utime(path, (self._now, self._now))

    @property
    def left(self) -> list[int]:
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("checkpoint-*"))


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_the_last_checkpoint_goes_when_a_newer_one_has_committed_and_not_before(run: Run) -> None:
    run.save(10)(Phase.COMMITTED)
    end = run.save(20)
    assert run.left == [10, 20]
    end(Phase.COMMITTED)
    assert run.left == [20]


def test_what_fails_takes_no_checkpoint_with_it(run: Run) -> None:
    run.save(10)(Phase.COMMITTED)
    run.save(20)(Phase.FAILED)
    assert run.left == [10, 20]
    run.save(30)(Phase.COMMITTED)
    assert 30 in run.left
    assert 10 not in run.left


def test_a_directory_that_is_only_just_made_takes_none_with_it(run: Run) -> None:
    end = run.save(10)
    (run.folder / "checkpoint-20").mkdir()  # the Trainer writes the model before it saves
    end(Phase.COMMITTED)
    assert run.left == [10, 20]


def test_where_nothing_is_saved_by_engines_all_directories_count(run: Run) -> None:
    for step in (10, 20, 30):
        (run.folder / f"checkpoint-{step}").mkdir()
        run.touch(run.folder / f"checkpoint-{step}")
    run.rotate(str(run.folder), 2)
    assert run.left == [20, 30]


def test_the_newest_is_the_newest_that_committed(tmp_path: Path) -> None:
    for step in (5, 40, 300):
        (tmp_path / f"checkpoint-{step}").mkdir()
    last = _last(lambda _: "whatever it says")
    assert last(str(tmp_path)) == "whatever it says"
    for step in (5, 40):
        (tmp_path / f"checkpoint-{step}" / f"global_step{step}").mkdir()
    assert last(str(tmp_path)) == str(tmp_path / "checkpoint-40")


def test_accelerate_is_told_of_a_missing_checkpoint_by_an_error_and_others_as_deepspeed_tells_it() -> None:
    class Engine:
        def save_checkpoint(self, save_dir: str) -> None: ...

        def load_checkpoint(self, load_dir: str) -> tuple[str | None, dict[str, object] | None]:
            return (load_dir, {}) if load_dir == "there" else (None, None)

    engine = Engine()
    watch(engine)
    load_state = _loading_state(engine.load_checkpoint)
    with pytest.raises(NotFoundError, match="no checkpoint was committed in elsewhere"):
        load_state("elsewhere")
    assert load_state("there") == ("there", {})
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
