"""TorchFTCheckpointdManager with torchft's own Manager and lighthouse: replica groups as processes, one of which is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-all installs it")
pytest.importorskip("torchft", reason="needs torchft: make test-all installs it")

from torchft.coordination import LighthouseServer

from checkpointd_client import open_checkpoint
from tests.faults.jobs import wait_until
from tests.logged_roots import log_state

HERE = Path(__file__).parent
PROJECT = HERE.parents[2]
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300), pytest.mark.xdist_group("torchtitan")]


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    yield server.address()
    server.shutdown()


class Groups:
    """The groups of a run, whose files lie in `folder`."""

    def __init__(self, folder: Path, lighthouse: str) -> None:
        self._folder, self._lighthouse = folder, lighthouse

    def start(self, number: int, **given: Any) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{PROJECT}:{PROJECT / 'client'}",
            "OMP_NUM_THREADS": "1",
            "TORCHFT_LIGHTHOUSE": self._lighthouse,
            "CHECKPOINTD_JOB": "replicas",
        }
        said = json.dumps({"dump": str(self._folder), "result": self._result(number), "number": number, **given})
        with (self._folder / f"log-{number}").open("ab") as log:
            command = [sys.executable, str(HERE / "replica_group.py"), said]
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def _result(self, number: int) -> str:
        return str(self._folder / f"result-{number}.pt")

    def said(self) -> str:
        return "\n".join(log.read_text()[-4000:] for log in sorted(self._folder.glob("log-*")))

    def ended(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(self._result(number))
        return found


def test_a_group_that_is_killed_comes_back_and_the_folder_goes_from_hand_to_hand(tmp_path: Path, lighthouse: str) -> None:
    groups, folder = Groups(tmp_path, lighthouse), tmp_path / "checkpoint"
    one, two = groups.start(0, dies=True), groups.start(1, together=9)
    try:
        assert one.wait(120) == -9, groups.said()
        wait_until(lambda: log_state(folder).start > 1, f"group 1 has taken the folder over\n{groups.said()}")
        one = groups.start(0, together=6)
        assert (one.wait(120), two.wait(120)) == (0, 0), groups.said()
    finally:
        one.kill()
        two.kill()
    first, second = groups.ended(0), groups.ended(1)
    assert first["step"] == second["step"]
    assert first["data"] > 7  # of which seven since the kill: it went on with its own batches
    with open_checkpoint(folder) as opened:
        saved = dict(opened.tensors())
        assert opened.step == first["step"]
    for name, value in first["weights"].items():
        assert torch.equal(value, second["weights"][name])
        assert torch.equal(value, saved[name])
