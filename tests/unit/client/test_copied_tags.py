"""Somebody copies or renames the directory of one tag: every load and command says so at once, and touches nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from checkpointd.cli import run
from checkpointd.errors import DamagedError, NotFoundError, UsageError
from checkpointd_client import Checkpointer, list_checkpoints, open_checkpoint
from checkpointd_client.export.consolidate import consolidate


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


@pytest.mark.parametrize("tag", [None, "global_step1", "latest"])
def test_opening_a_tag_that_was_copied_alone_says_what_to_copy(copy: Path, tag: str | None) -> None:
    if tag == "latest":
        (copy / "latest").write_text("global_step1\n")
    with pytest.raises(DamagedError, match=r"needs global_step0/\S+, which is gone.*copy the whole root instead"):
        open_checkpoint(copy, tag)


@pytest.mark.parametrize("tag", [None, "global_step1"])
def test_loading_it_touches_nothing_and_never_proposes_to_begin_afresh(copy: Path, tag: str | None) -> None:
    state = {"model": model()}
    before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    with Checkpointer(copy, absence_s=0.1) as ckpt, pytest.raises(DamagedError, match="copy the whole root instead") as caught:
        ckpt.load(state, tag=tag)
    assert "afresh" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in state["model"].state_dict().items())


def test_exporting_it_says_what_to_copy(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(DamagedError, match="copy the whole root instead"):
        consolidate(copy, tmp_path / "out.pt", tag="global_step1")
    assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("command", ["list", "verify"])
def test_commands_say_so_too(copy: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    run([command, str(copy)])
    said = capsys.readouterr()
    assert "copy the whole root instead" in said.out + said.err


def test_a_whole_tag_that_was_copied_alone_loads(root: Path) -> None:
    """The first tag refers to no other."""
    place = root.parent / "copy"
    shutil.copytree(root / "global_step0", place / "global_step0")
    with open_checkpoint(place) as checkpoint:
        assert checkpoint.tag == "global_step0"
        assert checkpoint.tensor("model.base.weight").shape == (600, 600)


@pytest.mark.parametrize("place", ["run", "copy"])
def test_a_tags_directory_is_no_root(root: Path, copy: Path, place: str) -> None:
    at = copy if place == "copy" else root
    calls = [open_checkpoint, Checkpointer, lambda where: open_checkpoint(where, "global_step1")]
    for call in calls:
        with pytest.raises(UsageError, match=f"is the directory of the tag 'global_step1'; its root is {at}"):
            call(at / "global_step1")
    assert sorted(path.name for path in (at / "global_step1").iterdir()) == ["00000001-0"], "it has become a root"


def test_a_copy_in_the_same_root_is_no_checkpoint_and_no_damage(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(root / "global_step1", root / "backup")
    words = "backup at .* is a copy of the directory of global_step1"
    with open_checkpoint(root) as checkpoint:
        assert (checkpoint.tag, checkpoint.passed_over) == ("global_step1", ())
    with pytest.raises(DamagedError, match=words):
        open_checkpoint(root, "backup")
    with Checkpointer(root) as ckpt:
        loaded = ckpt.load({"model": model()})
        assert loaded is not None
        assert (loaded.tag, loaded.fell_back_from) == ("global_step1", ())
        with pytest.raises(DamagedError, match=words):
            ckpt.load({"model": model()}, tag="backup")
    assert "is a copy of the directory of global_step1" in caplog.text
    assert not [one for one in caplog.records if one.levelname == "ERROR"]
    assert sorted(path.name for path in (root / "backup" / "00000001-0").iterdir()) == sorted(
        path.name for path in (root / "global_step1" / "00000001-0").iterdir()
    ), "something was recorded in the copy"


def test_a_tag_under_another_name_is_called_that(root: Path) -> None:
    (root / "global_step1").rename(root / "keep")
    with pytest.raises(DamagedError, match=r"keep at .* is global_step1 under another name.*: rename it back to global_step1"):
        open_checkpoint(root, "keep")
    with pytest.raises((DamagedError, NotFoundError)):
        open_checkpoint(root, "global_step1")
    with open_checkpoint(root) as checkpoint:
        assert checkpoint.tag == "global_step0"


def test_every_command_names_a_copy_in_the_root(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(root / "global_step1", root / "backup")
    for command, code in (
        (["list"], 0),
        (["status"], 0),
        (["verify"], 0),
        (["explain", "backup"], 0),
        (["verify", "backup"], 5),
    ):
        assert run([command[0], str(root), *command[1:]]) == code, command
        said = capsys.readouterr()
        assert "is a copy of the directory of global_step1" in said.out + said.err, command
    assert run(["gc", str(root), "--keep-last", "1"]) == 0
    assert (root / "backup" / "00000001-0" / "outcome").exists()
    with open_checkpoint(root) as checkpoint:
        assert checkpoint.tensor("model.base.weight").shape == (600, 600)


def test_removing_the_copy_leaves_nothing_behind(root: Path) -> None:
    shutil.copytree(root / "global_step1", root / "backup")
    with Checkpointer(root) as ckpt:
        ckpt.load({"model": model()})
    shutil.rmtree(root / "backup")
    for _ in range(2):
        with Checkpointer(root) as ckpt:
            ckpt.load({"model": model()})
    assert not (root / "backup").exists()


def test_a_copy_is_never_listed_as_the_newest_and_delete_says_what_to_do_with_it(root: Path) -> None:
    shutil.copytree(root / "global_step1", root / "global_step9")
    assert [one.tag for one in list_checkpoints(root)] == ["global_step1", "global_step0", "global_step9"]
    with Checkpointer(root) as ckpt, pytest.raises(DamagedError) as caught:
        ckpt.delete("global_step9")
    assert str(caught.value).endswith("then remove the directory global_step9")
