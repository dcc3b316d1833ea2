"""SIGTERM to torchrun while its ranks are not in the training loop: all of them save the same step before SIGKILL comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.jobs import children_of, kill, rank_environment, wait_until

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("preempted_ranks.py")
WORLD = 2
LIMIT_S = 120.0


@pytest.mark.e2e
@pytest.mark.parametrize(("where", "step"), [("warm-up", 0), ("evaluation", 3)])
def test_sigterm_outside_the_training_loop_leads_to_a_save_of_that_step(tmp_path: Path, where: str, step: int) -> None:
    environment = {k: v for k, v in rank_environment(WORLD).items() if not k.startswith(("MASTER", "WORLD"))}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    with (tmp_path / "stderr").open("w") as errors:
        process = subprocess.Popen(
            [*torchrun, str(SCRIPT), where, str(tmp_path)], stderr=errors, stdout=errors, env=environment
        )
    ranks = []
    try:

        def inside() -> bool:
            assert process.poll() is None, (tmp_path / "stderr").read_text()
            return all((tmp_path / f"inside-{rank}").exists() for rank in range(WORLD))

        wait_until(inside, "all ranks are inside", limit_s=LIMIT_S)
        ranks = list(children_of(process.pid))
        os.kill(process.pid, signal.SIGTERM)
        process.wait(LIMIT_S)
    finally:
        for pid in [*ranks, process.pid]:
            kill(pid)
        process.wait()
    said = (tmp_path / "stderr").read_text()
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(WORLD)] == [str(step)] * WORLD, said
    assert (tmp_path / "root" / "latest").read_text() == f"global_step{step}\n"
