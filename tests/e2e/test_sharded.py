"""Every layout into every layout, on every number of ranks: real gloo ranks, which are started once for all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.exports import wrong_exports
from tests.e2e.rank_cases import show_cases
from tests.e2e.sharded_ranks import PROCESSES
from tests.faults.daemons import Daemon
from tests.faults.jobs import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


def test_whatever_was_saved_loads_wherever(
    tmp_path: Path, daemon: Daemon, request: pytest.FixtureRequest, subtests: pytest.Subtests
) -> None:
    """The matrix of worlds, layouts and dtypes; ranks that disagree; restarts beside a sidecar; exports."""
    every = ["every"] if request.config.getoption("--every-load") else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "SIDECAR": str(daemon.socket),
    }
    script = Path(__file__).with_name("sharded_ranks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(number), *every],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(PROCESSES)
    ]
    try:
        # The one that ends first is the one to ask: the others wait for it, or have ended as well.
        wait_until(lambda: any(rank.poll() is not None for rank in ranks), "a rank has ended", limit_s=550)
        failed = [rank for rank in ranks if rank.poll()]
        for rank in ranks if failed else ():
            rank.kill()
        said = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    show_cases(subtests, tmp_path, PROCESSES, "\n".join(errors[-4000:] for _, errors in said))
    with subtests.test("exports"):
        assert list(wrong_exports(tmp_path, worlds=(2, 3))) == []
