"""DeepSpeed engines as boxes: every ZeRO stage into every other on 1 to 4 gloo ranks, which are started once for all of it."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import wait_until

PROCESSES = 4

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install checkpointd[deepspeed]"
    ),
]


def test_whatever_an_engine_saved_loads_at_any_stage_and_number_of_ranks(tmp_path: Path) -> None:
    """Bit for bit, against DeepSpeed's own view of parameters, masters and states; plain models; parts of a checkpoint."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    script = Path(__file__).with_name("deepspeed_boxes_ranks.py")
    logs = [tmp_path / f"rank-{number}.log" for number in range(PROCESSES)]
    ranks = []
    try:
        for number, log in enumerate(logs):
            with log.open("w") as out:  # what DeepSpeed prints would fill a pipe
                command = [sys.executable, str(script), str(tmp_path), str(number)]
                ranks.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
        # The one that ends first is the one to ask: the others wait for it, or have ended as well.
        wait_until(lambda: any(rank.poll() is not None for rank in ranks), "a rank has ended", limit_s=350)
        for rank in ranks if any(rank.poll() for rank in ranks) else ():
            rank.kill()
        for rank in ranks:
            rank.wait(30)
    finally:
        for rank in ranks:
            rank.kill()
    for log in logs:
        lines = log.read_text().splitlines()
        assert lines[-1:] == ["done"], "\n".join(lines[-60:])
        assert [line for line in lines if line.startswith("wrong:")] == []
