"""Reading from a read-only root, and beside a job that saves: neither disturbs the other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointd_client import Checkpointer
from tests.faults.jobs import MIB
from tests.faults.mounts import remount, tmpfs

pytestmark = pytest.mark.nightly

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "EVALUATION.md"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}

AS_NOBODY = """
import os, sys, torch
from checkpointd_client import open_checkpoint

def read():
    model = torch.nn.Linear(8, 4)
    with open_checkpoint(sys.argv[1]) as opened:
        opened.load({"model": model}, only="model")
        return opened.step, opened.client_state, opened.tensor("model.bias").sum().item(), model.bias.sum().item()

read()  # so that all of it is loaded: this user may not reach the libraries
os.setgid(65534)
os.setuid(65534)
try:
    open(f"{sys.argv[1]}/x", "w")
except OSError:
    print(read())
"""


def model(value: float) -> torch.nn.Linear:
    made = torch.nn.Linear(8, 4)
    for parameter in made.parameters():
        torch.nn.init.constant_(parameter, value)
    return made


def save(root: Path, step: int) -> None:
    with Checkpointer(root) as ckpt:
        ckpt.save(step, {"model": model(step), "other": torch.ones(3)}, client_state={"at": step}).wait()


@pytest.mark.root
@pytest.mark.xdist_group("mounts")
def test_from_a_read_only_mount_and_as_a_user_who_may_only_read() -> None:
    with tmpfs(64 * MIB, "mode=755") as mounted:
        save(mounted / "root", 3)
        for readonly in (False, True):
            if readonly:
                remount(mounted, "ro")
            done = subprocess.run(
                [sys.executable, "-c", AS_NOBODY, str(mounted / "root")],
                capture_output=True,
                text=True,
                env=ENVIRONMENT,
                check=True,
            )
            assert done.stdout == "(3, {'at': 3}, 12.0, 12.0)\n", done.stderr


def script() -> str:
    """The one that EVALUATION shows."""
    return re.findall(r"(?ms)^```python\n(.*?)^```$", PAGE.read_text())[0]


def test_an_evaluation_script_in_a_process_of_its_own_and_the_jobs_next_saves_go_on(tmp_path: Path) -> None:
    """The script as the manual has it, between two saves of a job."""
    (tmp_path / "my_model.py").write_text(
        "import torch\n"
        "def build_model():\n    return torch.nn.Linear(8, 4)\n"
        "def evaluate(model):\n    return model.bias.sum().item()\n"
    )
    (tmp_path / "evaluate.py").write_text(script().replace("/mnt/ckpts/run1", str(tmp_path / "root")))
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    with Checkpointer(tmp_path / "root") as ckpt:
        for step in (1, 2):
            saved = {"model": model(step), "optimizer": torch.optim.SGD(model(0).parameters())}
            assert ckpt.save(step, saved, client_state={"tokens": 5}).wait().phase == "committed"
            done = subprocess.run(
                [sys.executable, str(tmp_path / "evaluate.py")], capture_output=True, text=True, env=environment, check=True
            )
            assert done.stdout == f"global_step{step} {step} {4.0 * step}\n", done.stderr
