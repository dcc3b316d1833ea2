"""What Hugging Face's Trainer does to directories, as long as a save is not yet a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpointd_client.integrations.huggingface import filling, trainer
from checkpointd_client.integrations.huggingface.filling import Filling, Wanted
from checkpointd_client.integrations.huggingface.rotating import Saves
from checkpointd_client.saves.handle import Phase
from tests.unit.client.integrations.huggingface.saving_run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> Saves:
    made = Saves()
    monkeypatch.setattr(trainer, "SAVES", made)
    return made


def test_the_limit_of_one_training_is_none_of_the_next(run: Run, saves: Saves) -> None:
    run.saves = saves
    run.whole(1)
    run.ask(1)
    saves.note_best(str(run.folder), str(run.folder / "checkpoint-1"))
    trainer._resuming(lambda _self, resume: resume)(SimpleNamespace(is_deepspeed_enabled=False))
    assert saves.best(str(run.folder)) is None
    run.save(2)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-2"]
    run.ask(1)
    run.ask(0)  # no limit any more
    run.save(3)(Phase.COMMITTED)
    assert run.settled() == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


def test_what_does_not_go_through_an_engine_is_rotated_as_ever(tmp_path: Path, saves: Saves) -> None:
    asked: list[tuple[object, ...]] = []
    rotate_checkpoints = trainer._rotating(lambda *args, **options: asked.append((args, options)))
    rotate_checkpoints(str(tmp_path), 1, use_mtime=True)
    assert asked == [((str(tmp_path), 1), {"use_mtime": True})]


class Served:
    """Saves with the engine that it is given, and with no other."""

    def __init__(self, engine: object) -> None:
        self.engine = engine
        self.left = 0

    def serves(self, engine: object) -> bool:
        return engine is self.engine

    def filling(self, wanted: Wanted) -> Filling | None:
        return None

    def chosen(self, engine: object, folder: str, asked: str | None) -> str | None:
        return f"{folder}/checkpoint-4" if asked is None else asked

    def leave(self) -> None:
        self.left += 1


def test_a_save_on_sigterm_makes_no_directory_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer's own way makes checkpoint-3 first; with an engine that is not attached it stays so."""
    done: list[str] = []
    engine = object()
    monkeypatch.setattr(filling, "SAVERS", [Served(engine)])
    save_at_once = trainer._saving_at_once(lambda _: done.append("as ever"))
    for at, only_model in ((engine, False), (engine, True), (object(), False), (None, False)):
        training = SimpleNamespace(
            args=SimpleNamespace(save_only_model=only_model),
            deepspeed=at,
            model="model",
            _save_checkpoint=lambda model, **_: done.append(model),
        )
        manager = SimpleNamespace(trainer=training, is_checkpoint_requested=True)
        save_at_once(manager)
        assert manager.is_checkpoint_requested == (done[-1] == "as ever")
    assert done == ["model", "as ever", "as ever", "as ever"]


@pytest.mark.parametrize(
    ("asked", "engine", "resumed"),
    [
        (True, False, "out/checkpoint-4"),
        ("out/checkpoint-2", False, "out/checkpoint-2"),
        (None, False, None),
        (False, False, False),
        (True, True, True),
    ],
)
def test_a_training_resumes_from_what_all_ranks_have_found_whole(
    monkeypatch: pytest.MonkeyPatch, asked: Any, engine: bool, resumed: Any
) -> None:
    monkeypatch.setattr(filling, "SAVERS", [Served(None)])
    training = SimpleNamespace(is_deepspeed_enabled=engine, args=SimpleNamespace(output_dir="out"))
    assert trainer._resuming(lambda _self, resume: resume)(training, asked) == resumed


def test_a_training_leaves_its_roots_whether_it_ends_well_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    served, training = Served(None), SimpleNamespace(is_deepspeed_enabled=False, args=SimpleNamespace(output_dir="out"))
    monkeypatch.setattr(filling, "SAVERS", [served])

    def pruned(*_: object) -> None:
        raise InterruptedError

    trainer._resuming(lambda *_: None)(training)
    with pytest.raises(InterruptedError):
        trainer._resuming(pruned)(training)
    assert served.left == 2


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
    trainer._finalizing(lambda training: ended.append(training.state.best_model_checkpoint))(Training())
    assert ended == [best]


def test_the_store_is_not_uploaded_to_the_hub() -> None:
    asked: list[list[str]] = []
    upload = trainer._uploading(lambda _self, ignore_patterns: asked.append(ignore_patterns))
    for given in (None, "_*", ["_*", "checkpoint-*"]):
        upload("the hub", ignore_patterns=given)
    store = [".checkpointd/*", "*/.checkpointd/*"]
    assert asked == [store, ["_*", *store], ["_*", "checkpoint-*", *store]]
