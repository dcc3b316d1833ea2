"""Sharded trainings with Lightning on CPU ranks: all or nothing, and on any number of ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.faults.daemons import Daemon

pytest.importorskip("lightning", reason="needs lightning: make test-all installs it")

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
PROJECT = HERE.parents[2]
TIMEOUT_S = 300


def started(directory: Path, **given: Any) -> subprocess.CompletedProcess[str]:
    """A training, with its ranks, to its end."""
    said = json.dumps({"directory": str(directory), "result": result_of(directory, given), **given})
    environment = {**os.environ, "PYTHONPATH": f"{PROJECT}:{PROJECT / 'client'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "sharded_training.py"), said]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def result_of(directory: Path, given: dict[str, Any]) -> str:
    return f"{directory}-{given.get('steps', 8)}.pt"


def trained(directory: Path, **given: Any) -> dict[str, Any]:
    """What the training ended with."""
    ended = started(directory, **given)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = torch.load(result_of(directory, given))
    return found


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


def test_eight_steps_on_two_ranks_are_four_and_four_more_and_one_rank_goes_on_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    whole = trained(tmp_path / "whole")
    trained(run, steps=4)
    assert shown(run) == ["epoch=0-step=8.ckpt", "last.ckpt"]
    assert os.listdir(run / "last.ckpt") == []
    resumed = trained(run)
    assert equal(whole, resumed)
    assert shown(run) == ["epoch=1-step=16.ckpt", "last.ckpt"]
    alone = trained(run, steps=8, devices=1)  # trains no step: what it has is what it has loaded
    assert equal(whole, alone)


def test_the_weights_gathered_on_rank_0_go_to_one_file_and_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained(run, steps=4, full=True, last="link")
    assert os.readlink(run / "last.ckpt") == "epoch=0-step=8.ckpt"
    content = torch.load(run / "last.ckpt")
    assert content["state_dict"]["first.weight"].shape == (33, 6)
    assert content["hyper_parameters"] == {"manual": True}
    resumed = trained(run, full=True, last="link")
    assert equal(trained(tmp_path / "whole"), resumed)


def test_a_rank_that_is_killed_in_the_middle_of_a_save_costs_only_that_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert started(run, die=12).returncode != 0
    assert shown(run) == ["epoch=0-step=8.ckpt", "last.ckpt"]
    assert equal(trained(tmp_path / "whole"), trained(run))


def test_a_disk_that_fails_on_one_rank_costs_no_checkpoint_and_not_the_training(tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = trained(run, fail=[12], steps=6)
    assert found["step"] == 12
    assert "no space is left" in found["error"]  # of the last save, at the end of the training
    assert shown(run) == ["epoch=0-step=8.ckpt", "last.ckpt"]
    assert equal(trained(tmp_path / "whole"), trained(run))


def test_a_sidecar_saves_the_shards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with Daemon(tmp_path) as daemon:
        options = {"sidecar": str(daemon.socket)}
        trained(run, steps=4, options=options)
        assert shown(run) == ["epoch=0-step=8.ckpt", "last.ckpt"]
        resumed = trained(run, options=options)
    assert equal(trained(tmp_path / "whole"), resumed)
