"""Runs of Ray Train on two workers of this machine: one worker is killed, and the end is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ray: make integrations installs it")

import torch

from checkpointd_client import open_checkpoint

SCRIPT = Path(__file__).with_name("training.py")
pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(900)]


def run(storage: Path, **config: Any) -> dict[str, Any]:
    storage.mkdir()
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


def test_a_run_with_a_killed_worker_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    killed = run(tmp_path / "killed", kill_at=4, keep=2)
    assert (tmp_path / "killed" / "killed").exists()
    ends = [torch.load(tmp_path / name / "end.pt") for name in ("whole", "killed")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
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
