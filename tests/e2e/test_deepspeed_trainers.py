"""Hugging Face's Trainer and Accelerate with DeepSpeed, attached by the one line: save, rotate, resume."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDED = ("deepspeed", "transformers", "accelerate")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install {' '.join(MISSING)}"),
]


@pytest.mark.parametrize("library", ["Trainer", "Accelerate"])
def test_those_who_make_engines_themselves_are_served(tmp_path: Path, library: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    script = Path(__file__).with_name("deepspeed_trainers_ranks.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(
        [*command, str(tmp_path), library], capture_output=True, text=True, env=environment, timeout=280, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith(("wrong:", "done"))]
    assert told == ["done", "done"], f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
