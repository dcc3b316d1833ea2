"""Jobs of two ranks on the simulated device, which are started once for all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.rank_cases import show_cases
from tests.faults.jobs import wait_until

PROCESSES = 2  # a process that imports device_ranks.py would have the device for good

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("compiler")]


def test_every_layout_trains_saves_and_loads_on_devices(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Bit for bit as in host memory, on the same and on another number of ranks; and what the layouts do not reach."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("device_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(number)], stderr=subprocess.PIPE, text=True, env=environment
        )
        for number in range(PROCESSES)
    ]
    try:
        # The one that ends first is the one to ask: the other waits for it, or has ended as well.
        wait_until(lambda: any(rank.poll() is not None for rank in ranks), "a rank has ended", limit_s=250)
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
        said = [rank.communicate()[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    show_cases(subtests, tmp_path, PROCESSES, "\n".join(errors[-4000:] for errors in said))
