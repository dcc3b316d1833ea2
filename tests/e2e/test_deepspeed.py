"""Real DeepSpeed engines on two gloo ranks, which are started once for all of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install checkpointd[deepspeed]"
    ),
]


def test_engines_save_in_deepspeeds_own_files(tmp_path: Path) -> None:
    """ZeRO 0 to 3 in fp32 and bf16 against DeepSpeed's own saving; ranks that differ, fail, or are alone."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    script = Path(__file__).with_name("deepspeed_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=380, check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    assert lines == ["done", "done"], f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
