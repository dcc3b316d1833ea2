"""WEIGHTS-1 of integrations/deepspeed/offline/fp32.py: beside the result, one parameter is in memory at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[6]
MIB = 1 << 20
MODEL_MIB, PARAMETER_MIB = 192, 12
SLACK = 40 * MIB
"""What an interpreter takes for itself meanwhile: modules, thread stacks, free lists, and pages on their way out."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="pages of files are dropped on Linux alone"),
]


def test_weights_1_memory_is_the_result_and_a_parameter(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("zero_child.py"), tmp_path, str(MODEL_MIB)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert grown["get"] > MODEL_MIB * MIB  # the measure sees what is taken
    most = {"get": MODEL_MIB + PARAMETER_MIB, "lazy": 2 * PARAMETER_MIB, "convert": 4 * PARAMETER_MIB, "import": 128}
    assert all(grown[call] < mib * MIB + SLACK for call, mib in most.items()), grown
