"""A trainer that is killed right after save() returned."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.daemons import Daemon
from tests.faults.jobs import wait_until
from tests.uniform_weights import load_uniform_weights


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.parametrize("saves", [5, 1, 2])
def test_a_trainer_that_is_killed_right_after_save_returned_loses_nothing_with_a_sidecar(tmp_path: Path, saves: int) -> None:
    """The copy is whole when save() returns (staging="eager"): from then on nothing of the trainer is needed."""
    script = (
        "import os, signal, sys, torch\n"
        "from checkpointd_client import Checkpointer\n"
        "ckpt = Checkpointer(sys.argv[1], sidecar=sys.argv[2], staging='eager')\n"
        "for step in range(int(sys.argv[3])):\n"
        "    ckpt.save(step, {'w': torch.full((256, 256), float(step))})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root, tag = tmp_path / "root", f"global_step{saves - 1}"
    with Daemon(tmp_path) as daemon:
        killed = subprocess.run([sys.executable, "-c", script, str(root), str(daemon.socket), str(saves)], check=False)
        assert killed.returncode == -signal.SIGKILL
        pointer = root / "latest"
        wait_until(lambda: pointer.exists() and pointer.read_text().strip() == tag, f"{tag} was committed")
    assert load_uniform_weights(root) == (saves - 1, float(saves - 1))
