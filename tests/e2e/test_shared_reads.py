"""Ranks that load the same share the reading: four real gloo ranks under DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.rank_cases import show_cases
from tests.e2e.shared_reads_ranks import RANKS
from tests.faults.jobs import free_port

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(600)]


def test_ranks_that_load_the_same_read_each_byte_once(tmp_path: Path, subtests: pytest.Subtests) -> None:
    script, port = Path(__file__).with_name("shared_reads_ranks.py"), free_port()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), str(rank), str(port)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=500)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    show_cases(subtests, tmp_path, RANKS, "\n".join(said))
