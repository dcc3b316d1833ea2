"""Reading a root from Python without taking it: what is there, which is best, and one of a step."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from checkpointd.errors import NotFoundError, UsageError
from checkpointd_client import Checkpointer, Retention, list_checkpoints, open_checkpoint

LOSSES = {1: 0.5, 2: 0.25, 3: float("nan"), 4: 0.75}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    with Checkpointer(root, read_back=False, dedup=False) as ckpt:
        for step, loss in LOSSES.items():
            ckpt.save(step, {"w": torch.full((4,), float(step))}, metrics={"loss": loss}).wait()
        ckpt.save(5, {"w": torch.full((4,), 5.0)}, tag="plain").wait()
    return root


def test_checkpoints_are_listed_newest_first_beside_a_job_that_is_not_disturbed(root: Path, tmp_path: Path) -> None:
    before = sorted(str(path) for path in root.rglob("*"))
    found = list_checkpoints(root)
    assert [(one.step, one.tag) for one in found] == [(5, "plain"), *((s, f"global_step{s}") for s in (4, 3, 2, 1))]
    assert {one.whole for one in found} == {True}
    assert {one.read_back for one in found} == {"no"}
    assert found[1].metrics == {"loss": 0.75}
    assert found[0].metrics == {}
    assert all(one.committed_at is not None and 0 <= time.time() - one.committed_at < 3600 for one in found)
    assert sorted(str(path) for path in root.rglob("*")) == before
    with Checkpointer(tmp_path / "other") as ckpt:
        ckpt.save(1, {"w": torch.ones(4)}).wait()
        assert [one.tag for one in list_checkpoints(tmp_path / "other")] == [one.tag for one in ckpt.list()]
        ckpt.save(2, {"w": torch.ones(4)}).wait()


def test_the_best_come_first_by_a_metric_and_none_without_it(root: Path) -> None:
    assert [one.step for one in list_checkpoints(root, best_by="loss")] == [2, 1, 4]
    assert [one.step for one in list_checkpoints(root, best_by="loss", mode="max")] == [4, 1, 2]
    assert list_checkpoints(root, best_by="accuracy") == []


def test_one_whose_objects_are_gone_says_so_and_is_never_the_best(root: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    shutil.rmtree(copy / "global_step2")
    found = {one.step: one for one in list_checkpoints(copy)}
    assert not found[2].whole
    assert "global_step2" in found[2].problem
    assert found[4].whole
    assert [one.step for one in list_checkpoints(copy, best_by="loss")] == [1, 4]


def test_one_is_opened_by_its_step(root: Path) -> None:
    with open_checkpoint(root, step=2) as checkpoint:
        assert checkpoint.tag == "global_step2"
        assert checkpoint.committed_at == list_checkpoints(root)[3].committed_at
    with pytest.raises(NotFoundError, match=r"no checkpoint of step 9 .* the steps there are: 1, 2, 3, 4, 5"):
        open_checkpoint(root, step=9)
    with pytest.raises(UsageError, match="give one of them"):
        open_checkpoint(root, "global_step2", step=2)
    with pytest.raises(UsageError, match="step is -1"):
        open_checkpoint(root, step=-1)


def test_latest_can_be_opened_loaded_and_deleted_by_that_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"w": torch.full((4,), float(step))}).wait()
        (tmp_path / "latest").write_text("global_step1\n")  # an edit of the file changes nothing
        with open_checkpoint(tmp_path, "latest") as checkpoint:
            assert checkpoint.step == 2
        assert (ckpt.latest(), ckpt.latest_step()) == ("global_step2", 2)
        ckpt.delete("latest", force=True)
        assert [one.step for one in ckpt.list()] == [1]
        with pytest.raises(UsageError, match="contains a slash; use a plain name such as 'global_step2'"):
            ckpt.delete(f"{tmp_path}/global_step2")


@pytest.mark.parametrize(
    ("options", "words"),
    [({"best_by": 3}, "best_by is 3; it must be the name of a metric"), ({"mode": "least"}, "mode is 'least'; choose one of")],
)
def test_wrong_arguments_are_named(root: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list_checkpoints(root, **options)  # type: ignore[arg-type]


def test_a_place_without_checkpoints_says_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no directory"):
        list_checkpoints(tmp_path / "none")
    (tmp_path / ".metadata").touch()
    with pytest.raises(NotFoundError, match=r"no checkpoint at .* \(DCP\)"):
        list_checkpoints(tmp_path)


def test_a_number_alone_is_how_many_stay() -> None:
    assert Retention(3) == Retention(keep_last=3)
    with pytest.raises(TypeError):
        Retention(3, 1000)  # type: ignore[misc]
