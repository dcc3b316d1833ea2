"""One state in every form in which it is passed, in every layout and with every optimizer, on any number of ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3000)]


def test_whatever_form_a_state_has_it_comes_back(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Compared as full tensors, and by the next step. `--every-load`: 120 checkpoints, each loaded eight times."""
    every = request.config.getoption("--every-load")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "TORCH_LOGS": "-all",
    }
    script = Path(__file__).with_name("state_form_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), *(["every"] if every else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    said = "".join(path.read_text() for path in sorted(tmp_path.glob("rank-*.log")))
    assert re.findall("wrong: .*", said) == []
    assert done.returncode == 0, f"{done.stderr[-2000:]}{said[-6000:]}"
    assert set(re.findall(r"(\d+) (save|load)s on (\d)", said)) == (EVERY if every else CHOSEN)


EVERY = {
    *(("60", "save", world) for world in "24"),
    *(("240", "load", world) for world in "1234"),
}
CHOSEN = {("6", "save", "4"), ("2", "load", "1"), ("4", "load", "2")}
