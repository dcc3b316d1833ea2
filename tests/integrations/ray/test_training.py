"""Runs of Ray Train on two workers of this machine: one worker is killed, and the end is that of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: make test-all installs it")

import torch

from checkpointd.pipeline.root import root_view
from checkpointd.store.posix.store import PosixStore
from checkpointd_client import open_checkpoint

SCRIPT = Path(__file__).with_name("training.py")
pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(900)]


def run(storage: Path, **config: Any) -> dict[str, Any]:
    storage.mkdir(exist_ok=True)
    arguments = json.dumps({"storage": str(storage), "name": "run1", "steps": 6, **config})
    done = subprocess.run(
        [sys.executable, str(SCRIPT), arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_TRAIN_ENABLE_V2": "1", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-4000:] + done.stderr[-8000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    assert result["error"] == ""
    return result


def ends_alike(*storages: Path) -> bool:
    """Whether the runs have the same weights at their ends, bit for bit."""
    one, two = (torch.load(storage / "end.pt") for storage in storages)
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_with_a_killed_worker_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    killed = run(tmp_path / "killed", kill_at=4, keep=2)
    assert (tmp_path / "killed" / "killed").exists()
    assert ends_alike(tmp_path / "whole", tmp_path / "killed")
    assert [each["step"] for each in whole["reported"]] == [1, 2, 3, 4, 5, 6]
    assert [each["step"] for each in killed["reported"]] == [5, 6]
    assert all(each["metrics"]["first"] > 1 for each in killed["reported"]), "it began anew"


def test_ray_keeps_and_removes_checkpoints_of_a_root_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    result = run(tmp_path / "storage", keep=1, root=str(root))
    assert [each["step"] for each in result["reported"]] == [6]
    assert not (tmp_path / "storage" / "run1" / "checkpointd").exists()
    with open_checkpoint(root) as newest:
        assert newest.step == 6


def test_a_report_that_rays_storage_does_not_take_loses_no_step(tmp_path: Path) -> None:
    """Ray ends training, as with its own reports, and starts it again; the checkpoint was committed."""
    run(tmp_path / "whole")
    refused = run(tmp_path / "refused", refused_at=3)
    assert ends_alike(tmp_path / "whole", tmp_path / "refused")
    assert {each["metrics"]["first"] for each in refused["reported"] if each["step"] > 3} == {4}


def test_a_sharded_run_goes_on_with_fewer_workers(tmp_path: Path) -> None:
    run(tmp_path / "whole", sharded=True)
    run(tmp_path / "fewer", sharded=True, steps=3)
    result = run(tmp_path / "fewer", sharded=True, workers=1)
    assert [each["metrics"]["first"] for each in result["reported"]] == [1, 1, 1, 4, 4, 4]
    one, two = (torch.load(tmp_path / name / "end.pt") for name in ("whole", "fewer"))
    for name in one:  # one worker adds its gradients up in another order
        torch.testing.assert_close(one[name], two[name])


def test_ray_keeps_the_best_checkpoints_and_the_newest(tmp_path: Path) -> None:
    scores = {"1": 1, "2": 9, "3": 3, "4": 8, "5": 2, "6": 4}
    result = run(tmp_path / "storage", keep=2, scores=scores)
    assert {each["step"] for each in result["reported"]} == {2, 4}
    assert result["newest"] == 6, "Ray keeps the newest one beside the best"
    assert asyncio.run(committed(tmp_path / "storage" / "run1" / "checkpointd")) >= {2, 4, 6}


async def committed(root: Path) -> set[int]:
    """The steps of the checkpoints at a root."""
    async with PosixStore(root, read_only=True) as store:
        return {checkpoint.commit.step for checkpoint in await root_view.checkpoints(store)}
