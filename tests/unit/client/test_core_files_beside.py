"""What other programs write beside a checkpoint of files: it appears with it, and goes with it, unless somebody keeps it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpointd.errors import StoreError
from checkpointd.layout.keys import shown_key
from checkpointd.pipeline.root import tag_directories
from checkpointd.store.posix.unfinished import GOING
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from tests.unit.client.shown_files import ABSENCE_S, beside, delete, example

WRITTEN = {"model.safetensors": "weights", "deep/config.json": "{}", "state.json": "step 8"}


@pytest.fixture
def ckpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Checkpointer]:
    monkeypatch.setattr(tag_directories, "ABSENCE_S", ABSENCE_S)
    with Checkpointer(tmp_path / "run" / ".checkpointd", absence_s=ABSENCE_S) as made:
        yield made


def save_beside(ckpt: Checkpointer, step: int) -> Path:
    """A save in `checkpoint-<step>`, beside whose files some other program writes its own. What is shown."""
    given = core_of(ckpt).fill(f"checkpoint-{step}")
    (Path(given.path) / "deep").mkdir(parents=True)
    for name, text in WRITTEN.items():
        (Path(given.path) / name).write_text(text)
    core_of(ckpt).save_files(step, example(), at=f"checkpoint-{step}/s", tag=f"c{step}--s", unfinished=given.name).wait(60)
    return beside(ckpt) / f"checkpoint-{step}"


def files_in(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_what_others_wrote_goes_with_the_checkpoint(ckpt: Checkpointer) -> None:
    folder = save_beside(ckpt, 8)
    assert {name: (folder / name).read_text() for name in WRITTEN} == WRITTEN
    delete(ckpt, "c8--s")
    assert not folder.exists()


@pytest.mark.parametrize("what", ["the optimizer's", "all"])
def test_what_is_left_or_new_where_somebody_removed_a_checkpoint_stays(ckpt: Checkpointer, what: str) -> None:
    """To keep the weights alone, or as another job saves in the same place that knows nothing of checkpointd."""
    folder = save_beside(ckpt, 8)
    shutil.rmtree(folder / "s" if what != "all" else folder)
    kept = dict(WRITTEN)
    if what == "all":
        folder.mkdir()
        (folder / "model.safetensors").write_text("of another job")
        kept = {"model.safetensors": "of another job"}
    save_beside(ckpt, 9)
    ckpt.close()  # tidies up
    root = Path(ckpt.status().root)
    assert not list(root.glob("c8--s/*/*.file"))
    assert list(root.glob("c9--s/*/*.file"))
    assert not (root / shown_key("checkpoint-8/s")).exists()
    assert files_in(folder) == kept


def test_what_was_written_again_stays_where_the_checkpoint_is_removed(ckpt: Checkpointer, tmp_path: Path) -> None:
    """TAGDIR-7: only what appeared with it goes."""
    folder = save_beside(ckpt, 8)
    (folder / "model.safetensors").write_text("trained")
    archive = (folder / "deep").rename(tmp_path / "archive")
    (folder / "deep").symlink_to(archive)
    delete(ckpt, "c8--s")
    assert sorted(os.listdir(folder)) == ["deep", "model.safetensors"]
    assert (folder / "model.safetensors").read_text() == "trained"
    assert files_in(archive) == {"config.json": "{}"}


def test_what_others_filled_appears_with_the_files_or_goes(ckpt: Checkpointer) -> None:
    for step in (8, 9):
        given = core_of(ckpt).fill(f"checkpoint-{step}")
        Path(given.path).mkdir(parents=True)
        (Path(given.path) / "state.json").write_text("mine")
        named = {"tag": f"c{step}--s", "unfinished": given.name}
        if step == 8:
            core_of(ckpt).save_files(step, example(), at="checkpoint-8/s", **named).wait(60)
        else:
            with pytest.raises(StoreError, match="it was not written"):
                core_of(ckpt).refuse(step, StoreError("it was not written"), **named).wait(60)
        assert not Path(given.path).parent.exists(), "its place, before it has its name"
    assert sorted(os.listdir(beside(ckpt))) == [".checkpointd", "checkpoint-8"]
    assert sorted(os.listdir(beside(ckpt) / "checkpoint-8")) == ["latest", "s", "state.json"]
    assert torch.load(beside(ckpt) / "checkpoint-8" / "s" / "mp_rank_00_model_states.pt")["lr"] == 0.1
    assert core_of(ckpt).removed() == frozenset()


def test_what_was_on_its_way_out_goes_with_the_next_start(tmp_path: Path) -> None:
    """As after a kill in the middle of Accelerate's rotation."""
    with Checkpointer(tmp_path / ".checkpointd") as ckpt:
        unfinished = Path(core_of(ckpt).fill("checkpoint-8").path).parents[1]
    (unfinished / f"{GOING}1" / "checkpoint_7").mkdir(parents=True)
    with Checkpointer(tmp_path / ".checkpointd"):
        assert not (unfinished / f"{GOING}1").exists()


@pytest.mark.parametrize("of_the_user", [False, True])
def test_what_others_filled_goes_with_the_checkpoint_and_what_the_user_adds_stays(
    ckpt: Checkpointer, of_the_user: bool
) -> None:
    """A half directory would be taken for the newest checkpoint."""
    given = core_of(ckpt).fill("checkpoint-8")
    Path(given.path).mkdir(parents=True)
    (Path(given.path) / "adapter" / "deep").mkdir(parents=True)
    for name in ("state.json", "adapter/weights", "adapter/deep/weights"):
        (Path(given.path) / name).write_text("mine")
    core_of(ckpt).save_files(8, example(), at="checkpoint-8/s", tag="c8--s", unfinished=given.name).wait(60)
    if of_the_user:
        (beside(ckpt) / "checkpoint-8" / "notes.txt").write_text("theirs")
    delete(ckpt, "c8--s")
    left = sorted(path.relative_to(beside(ckpt)).as_posix() for path in beside(ckpt).glob("checkpoint-8/**/*"))
    assert left == (["checkpoint-8/notes.txt"] if of_the_user else [])
    assert (beside(ckpt) / "checkpoint-8").exists() == of_the_user


# --- a directory that is the checkpoint's own ---------------------------------------------------------------------

NESTED = {"optimizer.pt", "shards/0.pt", "shards/deep/1.pt"}


def save_whole(ckpt: Checkpointer, at: str, step: int) -> Path:
    """A save whose files, some in directories, are shown in the directory that others have filled. What is shown."""
    given = core_of(ckpt).fill(at, whole=True)
    (Path(given.path) / "shards").mkdir(parents=True)
    (Path(given.path) / "state.json").write_text(f"step {step}")
    (Path(given.path) / "shards" / "index.json").write_text("{}")
    files = {name: {"step": step, "w": torch.full((5,), float(step))} for name in sorted(NESTED)}
    core_of(ckpt).save_files(step, files, at=at, tag=at.replace("/", "--"), unfinished=given.name).wait(60)
    return beside(ckpt) / at


def saved_step(folder: Path) -> set[int]:
    """The steps of all files in a directory that `save_whole` filled."""
    steps = {int(torch.load(folder / name, weights_only=True)["step"]) for name in NESTED}
    return steps | {int((folder / "state.json").read_text().removeprefix("step "))}


@pytest.mark.parametrize("at", ["checkpoint-8", "checkpoints/checkpoint_0", "same/same"])
def test_files_are_shown_in_the_directory_itself_and_go_with_it(ckpt: Checkpointer, at: str) -> None:
    (beside(ckpt) / at).parent.mkdir(exist_ok=True)
    folder = save_whole(ckpt, at, 8)
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {
        *NESTED,
        "state.json",
        "shards/index.json",
    }
    assert saved_step(folder) == {8}
    assert [path for path in folder.parent.iterdir() if path.name not in {folder.name, ".checkpointd"}] == [], "no `latest`"
    assert core_of(ckpt).latest() == at.replace("/", "--"), "the root's own pointer moves"
    delete(ckpt, at.replace("/", "--"))
    assert not folder.exists()


def test_a_directory_that_is_saved_again_has_the_new_files_and_keeps_the_users_own(ckpt: Checkpointer) -> None:
    folder = save_whole(ckpt, "final", 1)
    for name in ("notes.txt", "shards/notes.txt"):
        (folder / name).write_text("mine")
    assert saved_step(save_whole(ckpt, "final", 2)) == {2}
    assert (folder / "notes.txt").read_text() == (folder / "shards" / "notes.txt").read_text() == "mine"
    delete(ckpt, "final")
    assert {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} == {"notes.txt", "shards/notes.txt"}


def test_what_fills_a_whole_directory_of_a_save_that_aborts_goes_with_the_next_start(tmp_path: Path) -> None:
    root = tmp_path / "run" / ".checkpointd"
    with Checkpointer(root) as first:
        left = Path(core_of(first).fill("checkpoint-8", whole=True).path)
        left.mkdir(parents=True)
    with Checkpointer(root):
        assert not left.exists()
