"""DeepSpeed's own checkpoints, made by real engines on two gloo ranks: what is read of them is what DeepSpeed reads."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install checkpointd[deepspeed]"
    ),
]


def test_weights_and_imports_are_deepspeeds_to_the_bit(tmp_path: Path) -> None:
    """ZeRO 1 to 3, two groups, sub-groups, tied and frozen weights; the import goes on in engines of this and other stages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    script = Path(__file__).with_name("deepspeed_tools_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert lines == ["done", "done"], f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
