"""What a conversion holds is bounded, and small beside the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from tests.unit.client.integrations.dcp.dcp_child import MEMORY_BYTES
from tests.unit.export.export_child import MIB

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[5]
MODEL_MIB = 256
SLACK = 48 * MIB
"""What torch takes for itself when it is first used, thread stacks, and free lists."""


@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_memory_stays_far_below_the_model_both_ways(tmp_path: Path) -> None:
    large = torch.zeros(MODEL_MIB * MIB // 4096, 1024)
    large.random_(0, 1 << 20)
    state = {"large": large, "small": [torch.ones(3)] * 20}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path / "source", sync_files=False), no_dist=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.unit.client.integrations.dcp.dcp_child",
            *(str(tmp_path / name) for name in ("source", "root", "out")),
        ],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}", "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    imported, exported = map(int, done.stdout.split())
    assert imported < MEMORY_BYTES + SLACK < MODEL_MIB * MIB // 2
    assert exported < MEMORY_BYTES + SLACK
    assert sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) > MODEL_MIB * MIB
