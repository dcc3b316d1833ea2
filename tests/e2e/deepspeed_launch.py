"""Two gloo ranks of a script that uses DeepSpeed, under torchrun; this module does without it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install '.[deepspeed]'"
)


def run_ranks(script: Path, *arguments: object, ranks: int = 2, limit_s: float = 280) -> subprocess.CompletedProcess[str]:
    """The job, ended; what all ranks printed is in its `stdout`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=limit_s, check=False
    )
