"""Which checkpoints lie in a folder of torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpointd_client.integrations.torchtitan.step_folders import (
    OtherStep,
    is_root,
    joined,
    other_steps,
    split,
    stale,
    step_in,
)


def made(folder: Path, name: str, file: str = "") -> None:
    (folder / name).mkdir()
    if file:
        (folder / name / file).touch()


@pytest.mark.parametrize(
    ("checkpoint_id", "expected"),
    [
        ("/runs/a/step-5", ("/runs/a", "step-5")),
        ("/runs/a/step-5/", ("/runs/a", "step-5")),
        ("s3://b/a/step-0", ("s3://b/a", "step-0")),
        ("s3://b/a/step-0?endpoint=http://c/d", ("s3://b/a?endpoint=http://c/d", "step-0")),
    ],
)
def test_split(checkpoint_id: str, expected: tuple[str, str]) -> None:
    assert split(checkpoint_id) == expected


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("/runs/a", "/runs/a/step-5"),
        ("/runs/a/", "/runs/a/step-5"),
        ("s3://b/a/?endpoint=http://c/d", "s3://b/a/step-5?endpoint=http://c/d"),
        ("/runs/what?", "/runs/what?/step-5"),
    ],
)
def test_joined(folder: str, expected: str) -> None:
    assert joined(folder, "step-5") == expected


@pytest.mark.parametrize(("name", "step"), [("step-5", 5), ("step-0", 0), ("my-step-5", 0), ("step-5.old", 0), ("latest", 0)])
def test_step_in(name: str, step: int) -> None:
    assert step_in(name) == step


def test_other_steps_are_whole_and_not_ours(tmp_path: Path) -> None:
    made(tmp_path, "step-20", ".metadata")
    made(tmp_path, "step-3", ".metadata")
    made(tmp_path, "step-5", "model.safetensors.index.json")
    made(tmp_path, "step-7", "__0_0.distcp")  # not finished
    made(tmp_path, "step-9", ".metadata")  # saved by us later
    made(tmp_path, "old-step-4", ".metadata")
    made(tmp_path, "latest", ".metadata")
    found = other_steps(str(tmp_path), ["step-9"])
    assert [(other.step, other.kind) for other in found] == [(3, "dcp"), (5, "hugging face"), (20, "dcp")]
    assert found[0].path == str(tmp_path / "step-3")


def test_there_are_none_in_a_folder_that_is_not_there_or_in_a_bucket(tmp_path: Path) -> None:
    assert other_steps(str(tmp_path / "absent"), ()) == []
    assert other_steps("s3://bucket/run", ()) == []


def test_is_root(tmp_path: Path) -> None:
    assert not is_root(str(tmp_path))
    made(tmp_path, "log", "root")
    assert is_root(str(tmp_path))
    assert is_root("s3://bucket/run")


@pytest.mark.parametrize(
    ("ours", "keep", "gone"),
    [(0, 3, [1]), (1, 3, [1, 2]), (2, 3, [1, 2, 3]), (3, 3, [1, 2, 3, 4]), (9, 3, [1, 2, 3, 4]), (0, 4, [])],
)
def test_the_newest_stay(ours: int, keep: int, gone: list[int]) -> None:
    others = [OtherStep(step, f"step-{step}", "dcp") for step in (1, 2, 3, 4)]
    assert [other.step for other in stale(others, ours, keep)] == gone
