"""One state in every form in which it is passed, in every layout and with every optimizer, on any number of ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.forked_ranks import forked_output
from tests.e2e.rank_cases import FINISHED, noted_cases, show_cases

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(3000)]


def test_whatever_form_a_state_has_it_comes_back(
    tmp_path: Path, request: pytest.FixtureRequest, subtests: pytest.Subtests
) -> None:
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
    output = done.stderr[-2000:] + forked_output(tmp_path)
    for (kind, world), cases in (EVERY if every else CHOSEN).items():
        folder = tmp_path / f"{kind}-{world}"
        show_cases(subtests, folder, world, output)
        with subtests.test(f"{cases} cases", job=folder.name):
            assert len([name for name, _ in noted_cases(folder, 0) if name != FINISHED]) == cases
    with subtests.test("the jobs end well"):
        assert done.returncode == 0, output


EVERY = {**{("save", world): 60 for world in (2, 4)}, **{("load", world): 240 for world in (1, 2, 3, 4)}}
CHOSEN = {("save", 4): 6, ("load", 1): 2, ("load", 2): 4}
"""How many cases each job has, by what it does and its number of ranks."""
