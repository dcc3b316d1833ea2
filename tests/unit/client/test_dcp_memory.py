"""What a conversion holds is bounded, and small beside the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.client.dcp_child import MEMORY_BYTES
from tests.unit.pipeline.export_child import MIB

ROOT = Path(__file__).parents[3]
MODEL_MIB = 384
SLACK = 64 * MIB
"""What torch takes for itself when it is first used, thread stacks, and free lists."""


def child(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.client.dcp_child", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_memory_stays_far_below_the_model_both_ways(tmp_path: Path) -> None:
    child("make", tmp_path / "source", str(MODEL_MIB))
    assert int(child("import", tmp_path / "source", tmp_path / "root")) < MEMORY_BYTES + SLACK < MODEL_MIB * MIB // 2
    assert int(child("export", tmp_path / "root", tmp_path / "out")) < MEMORY_BYTES + SLACK
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > MODEL_MIB * MIB
