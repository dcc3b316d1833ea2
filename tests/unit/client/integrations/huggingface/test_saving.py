"""What saves the directories of Trainer and Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointd.errors import CheckpointdError, StoreFullError, UsageError
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import rollback
from checkpointd_client.integrations.huggingface.filling import Wanted
from checkpointd_client.integrations.huggingface.saving import DirectorySaver


@pytest.mark.parametrize("options", [{"when_bussy": "wait"}, {"when_busy": "later"}])
def test_options_that_cannot_be_are_refused_before_the_training(options: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="when_busy"):
        DirectorySaver(None, options, synchronous=False)


@pytest.mark.parametrize(("options", "stays"), [({}, False), ({"retention": 3}, True)])
def test_a_run_without_a_load_replaces_what_it_saves_again(
    tmp_path: Path, options: dict[str, int], stays: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for content in (1.0, 2.0):
        saver = DirectorySaver(None, dict(options), synchronous=True)
        filling = saver.filling(Wanted(str(tmp_path / "checkpoint-1"), 1, None))
        assert filling is not None
        with filling.active():
            torch.save({"weight": torch.full((3,), content)}, Path(filling.filled.path, "model.pt"))
        filling.save(filling, ())
        saver.close()
    assert torch.load(tmp_path / "checkpoint-1" / "model.pt")["weight"].tolist() == [2.0] * 3
    stored = {path.parent.name for path in (tmp_path / ".checkpointd" / "checkpoint-1").glob("*/*.file")}
    assert stored == ({"00000001-0", "00000002-0"} if stays else {"00000002-0"})
    assert ("has not loaded" in caplog.text) is stays


def saved(saver: DirectorySaver, directory: Path, step: int) -> None:
    filling = saver.filling(Wanted(str(directory), step, None))
    assert filling is not None
    with filling.active():
        torch.save({"weight": torch.ones(3)}, Path(filling.filled.path, "model.pt"))
    filling.save(filling, ())


def test_a_root_that_was_left_is_saved_to_again_and_close_raises_the_error_of_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = DirectorySaver(None, {"retention": 1}, synchronous=False)
    saved(saver, tmp_path / "run" / "checkpoint-1", 1)
    saver.leave()
    assert not saver._roots.checkpointers
    saved(saver, tmp_path / "run" / "checkpoint-2", 2)
    saver.leave()
    assert {path.name for path in (tmp_path / "run").glob("checkpoint-*")} == {"checkpoint-2"}
    saver.close()
    with monkeypatch.context() as failing:
        failing.setattr(PosixStore, "open_writer", full)
        saved(saver, tmp_path / "run" / "checkpoint-3", 3)
        saver.leave()
    with pytest.raises(CheckpointdError, match="the disk is full"):
        saver.close()
    saver.close()


def test_a_run_that_went_back_resumes_from_there_although_higher_numbers_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saver = DirectorySaver(None, {}, synchronous=True)
    for step in (1, 2, 3):
        saved(saver, folder / f"checkpoint-{step}", step)
    saver.close()
    rollback(folder / ".checkpointd", "checkpoint-1")
    saver = DirectorySaver(None, {}, synchronous=True)
    assert saver.chosen(None, str(folder), None) == str(folder / "checkpoint-1")
    assert saver.chosen(None, str(folder), str(folder / "checkpoint-3")) == str(folder / "checkpoint-3"), "by its name"
    saver.close()
    assert (folder / "checkpoint-3" / "model.pt").exists()


def test_a_run_that_was_resumed_from_an_older_directory_goes_on_from_there(tmp_path: Path) -> None:
    """A later start takes what was saved since, and not the higher numbers of the branch that was left."""
    folder = tmp_path / "run"
    saver = DirectorySaver(None, {}, synchronous=True)
    for step in (1, 2, 3, 4):
        saved(saver, folder / f"checkpoint-{step}", step)
    saver.close()
    saver = DirectorySaver(None, {}, synchronous=True)
    assert saver.chosen(None, str(folder), str(folder / "checkpoint-1")) == str(folder / "checkpoint-1")
    saved(saver, folder / "checkpoint-2", 2)
    assert saver.chosen(None, str(folder), None) == str(folder / "checkpoint-2")
    saver.close()
    saver = DirectorySaver(None, {}, synchronous=True)
    assert saver.chosen(None, str(folder), None) == str(folder / "checkpoint-2")
    assert saver.chosen(None, str(folder), str(folder / "checkpoint-4")) == str(folder / "checkpoint-4"), "by its name"
    saver.close()
    stored = {path.parent.name for path in (folder / ".checkpointd" / "checkpoint-2").glob("*/*.file")}
    assert stored == {"00000002-0"}, "the directory shows the newer one, so the older one has gone"


async def full(*_: object, **__: object) -> Any:
    raise StoreFullError("the disk is full")
