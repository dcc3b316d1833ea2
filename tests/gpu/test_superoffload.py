"""The fine-tuning example with SuperOffload, as it is, on an NVIDIA GPU: it saves, is killed, and resumes, in both layouts."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.jobs import wait_until

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "demo" / "deepspeed_finetune.py"
SMALL = ["--layers", "2", "--length", "64", "--text_bytes", "200000", "--batch", "4", "--save_every", "4", "--steps", "12"]
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU: DeepSpeed takes no other device for SuperOffload"
    ),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed"),
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler, for DeepSpeed's CPUAdam"),
    pytest.mark.timeout(900),
]


def start(folder: Path, layout: str, *arguments: str) -> subprocess.Popen[str]:
    """The example, in a session of its own, so that it can be ended with the optimizer's process."""
    command = [sys.executable, "-u", SCRIPT, "--output_dir", folder, *SMALL, "--offload", "superoffload", "--layout", layout]
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [*command, *arguments], env={**os.environ, **ALONE}, stdout=output, stderr=output, text=True, start_new_session=True
        )


def losses(folder: Path) -> dict[int, float]:
    return {
        int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", (folder / "output.txt").read_text())
    }


@pytest.mark.parametrize("layout", ["deepspeed", "checkpointd"])
def test_the_example_goes_on_after_it_was_killed(tmp_path: Path, layout: str) -> None:
    job = start(tmp_path, layout, "--save_checkpoint")
    assert job.wait(400) == 0, (tmp_path / "output.txt").read_text()[-4000:]
    whole = losses(tmp_path)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "global_step12"
    shutil.rmtree(tmp_path / "checkpoints")
    job = start(tmp_path, layout, "--save_checkpoint")
    try:
        wait_until(lambda: 5 in losses(tmp_path), "the save after four steps has begun", limit_s=400)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    job = start(tmp_path, layout, "--resume")
    assert job.wait(400) == 0, (tmp_path / "output.txt").read_text()[-4000:]
    found = losses(tmp_path)
    first = min(found)
    assert first in (0, 4, 8), "the newest checkpoint that had committed"
    assert found[first] == pytest.approx(whole[first], rel=1e-2), "its weights are those of the undisturbed run"
