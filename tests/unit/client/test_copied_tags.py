"""Somebody copies or renames the directory of one tag: the log does not name the copy, and nothing touches it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd_client import Checkpointer, open_checkpoint


def model() -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"base": torch.nn.Linear(600, 600).requires_grad_(False), "head": torch.nn.Linear(600, 2)})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root of two checkpoints, of which the second refers to objects of the first."""
    trained = model()
    with Checkpointer(tmp_path / "run") as ckpt:
        for step in range(2):
            with torch.no_grad():
                trained["head"].weight.add_(1)
            ckpt.save(step, {"model": trained}).wait(60)
    return tmp_path / "run"


@pytest.fixture
def copy(root: Path) -> Path:
    """The second tag's directory alone, in another place."""
    place = root.parent / "copy"
    shutil.copytree(root / "global_step1", place / "global_step1")
    return place


@pytest.mark.parametrize("place", ["run", "copy"])
def test_a_tags_directory_is_no_root(root: Path, copy: Path, place: str) -> None:
    at = copy if place == "copy" else root
    calls = [open_checkpoint, Checkpointer, lambda where: open_checkpoint(where, "global_step1")]
    for call in calls:
        with pytest.raises(UsageError, match=f"is the directory of the tag 'global_step1'; its root is {at}"):
            call(at / "global_step1")
    assert sorted(path.name for path in (at / "global_step1").iterdir()) == ["00000001-0"], "it has become a root"


def test_a_tag_that_was_copied_alone_is_no_checkpoint(copy: Path) -> None:
    """Its log is what makes a directory a root."""
    for tag in ("global_step1", None):
        with pytest.raises(NotFoundError):
            open_checkpoint(copy, tag)


def test_a_copy_in_the_same_root_is_no_checkpoint_and_no_damage(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(root / "global_step1", root / "backup")
    with open_checkpoint(root) as checkpoint:
        assert (checkpoint.tag, checkpoint.passed_over) == ("global_step1", ())
    with pytest.raises(NotFoundError, match="there is no tag 'backup'"):
        open_checkpoint(root, "backup")
    with Checkpointer(root) as ckpt:
        loaded = ckpt.load({"model": model()})
        assert loaded is not None
        assert (loaded.tag, loaded.fell_back_from) == ("global_step1", ())
        with pytest.raises(NotFoundError, match="there is no tag 'backup'"):
            ckpt.delete("backup")
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    before, after = ({path.name for path in (root / tag).rglob("*")} for tag in ("global_step1", "backup"))
    assert after == before, "something was recorded in the copy, or removed"


def test_a_tag_under_another_name_is_damage(root: Path) -> None:
    (root / "global_step1").rename(root / "keep")
    with pytest.raises(NotFoundError):
        open_checkpoint(root, "keep", absence_s=0.1)
    with pytest.raises(DamagedError):
        open_checkpoint(root, "global_step1", absence_s=0.1)
    with open_checkpoint(root, absence_s=0.1) as checkpoint:
        assert checkpoint.tag == "global_step0"
