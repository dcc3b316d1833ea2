"""What is closed is gone: twenty trainings in one process leave no more behind than five."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.sweep import FIRST, KINDS, RUNS

NEEDED = {"trainer": "transformers", "pruned": "transformers"}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_trainings_one_after_the_other_keep_no_memory_threads_or_descriptors(tmp_path: Path, kind: str) -> None:
    needed = NEEDED.get(kind, kind)
    if kind not in ("plain", "dcp") and importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}: make test-all installs it")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", "tests.integrations.sweep", kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, last = json.loads((tmp_path / "measured").read_text())
    for what, before, after in zip(("snapshots", "threads", "descriptors"), first, last, strict=True):
        assert after - before < (RUNS - FIRST if what != "snapshots" else 1), f"{before} and then {after} {what}"
