"""Real trainings with Lightning: what is resumed equals what was never interrupted, and no failure leaves a run without a
checkpoint.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs lightning: make test-all installs it")

HERE = Path(__file__).parent
PROJECT = HERE.parents[2]
TIMEOUT_S = 500

pytestmark = pytest.mark.timeout(600)


def started(*trainings: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """One process that trains so, one after the other."""
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT}:{PROJECT / 'client'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "training.py"), json.dumps(trainings)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def trained(*trainings: dict[str, Any]) -> list[dict[str, Any]]:
    """What each training ended with."""
    results = [f"{one['directory']}-{one.get('steps', 8)}.pt" for one in trainings]
    ended = started(*({**one, "result": result} for one, result in zip(trainings, results, strict=True)))
    assert ended.returncode == 0, ended.stderr
    return [torch.load(result, weights_only=False) for result in results]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


def shown(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def check_resumed_equals_uninterrupted(tmp_path: Path, **given: Any) -> None:
    halves = {"directory": str(tmp_path / "halves"), **given}
    whole, half, resumed = trained({**halves, "directory": str(tmp_path / "whole")}, {**halves, "steps": 4}, halves)
    unlike = [key for key in whole if key not in ("best", "error") and not equal(whole[key], resumed[key])]
    assert unlike == []
    assert not equal(half["model"], resumed["model"])
    assert whole["error"] == resumed["error"] == ""
    assert Path(resumed["best"]).is_file()


def test_eight_steps_are_four_and_four_more(tmp_path: Path) -> None:
    check_resumed_equals_uninterrupted(tmp_path)
    assert shown(tmp_path / "halves") == ["epoch=1-step=8.ckpt", "last.ckpt"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["manual", "averaging"])
def test_so_they_are_with_several_optimizers_and_with_averaged_weights(tmp_path: Path, way: str) -> None:
    check_resumed_equals_uninterrupted(tmp_path, way=way)


@pytest.mark.nightly
def test_so_they_are_in_the_middle_of_an_epoch_with_a_loader_that_has_a_state(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="needs torchdata: make test-all installs it")
    check_resumed_equals_uninterrupted(tmp_path, data="stateful")


@pytest.mark.nightly
def test_so_they_are_on_two_ranks(tmp_path: Path) -> None:
    run = {"directory": str(tmp_path / "halves"), "devices": 2}
    (whole,) = trained({**run, "directory": str(tmp_path / "whole")})
    trained({**run, "steps": 4})
    (resumed,) = trained(run)
    assert equal(whole["model"], resumed["model"])
    assert equal(whole["optimizers"], resumed["optimizers"])


@pytest.mark.nightly
def test_a_training_that_is_killed_in_the_middle_of_a_save_goes_on_from_the_last_commit(tmp_path: Path) -> None:
    run = {"directory": str(tmp_path / "run")}
    assert started({**run, "die": 6}).returncode == -9
    assert shown(tmp_path / "run") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert torch.load(tmp_path / "run" / "last.ckpt")["global_step"] == 4
    resumed, whole = trained(run, {"directory": str(tmp_path / "whole")})
    assert equal(whole["model"], resumed["model"])
    assert resumed["batches"] == 8


@pytest.mark.nightly
def test_a_disk_that_fails_costs_no_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    run = {"directory": str(tmp_path / "run")}
    (found,) = trained({**run, "fail": [6], "steps": 6})
    assert found["step"] == 6
    assert "no space is left" in found["error"]  # of the last save, at the end of the training
    assert shown(tmp_path / "run") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    (resumed,) = trained(run)
    assert resumed["error"] == ""
    assert resumed["step"] == 8
    assert "epoch=1-step=8.ckpt" in shown(tmp_path / "run")


@pytest.mark.nightly
def test_a_failed_save_keeps_the_checkpoints_that_it_was_to_replace_and_the_link(tmp_path: Path) -> None:
    run = {"top_k": 2, "last": "link"}
    one, other = tmp_path / "one", tmp_path / "other"
    found, failed = trained({"directory": str(one), "fail": [4], **run}, {"directory": str(other), "fail": [6, 8], **run})
    assert found["error"] == ""
    assert shown(one) == ["epoch=1-step=6.ckpt", "epoch=1-step=8.ckpt", "last.ckpt"]
    assert os.readlink(one / "last.ckpt") == "epoch=1-step=8.ckpt"
    assert "no space is left" in failed["error"]
    assert shown(other) == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt", "last.ckpt"]
    assert os.readlink(other / "last.ckpt") == "epoch=0-step=4.ckpt"
