"""Reading from a read-only root, and beside a job that saves and removes checkpoints: neither disturbs the other."""

from __future__ import annotations

import itertools
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from checkpointd.errors import NotFoundError
from checkpointd_client import Checkpointer, Retention, open_checkpoint
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


class Trainer:
    """Saves one step after the other, and keeps the newest alone, until it is told to stop."""

    def __init__(self, root: Path) -> None:
        self._root, self._stop = root, threading.Event()
        self.begun, self.saved = threading.Event(), 0
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        state = {name: torch.zeros(64, 64) for name in "abcdefgh"}
        try:
            with Checkpointer(self._root, retention=Retention(keep_last=1), chunk_bytes=4096, on_no_progress="ignore") as ckpt:
                while not self._stop.is_set():
                    self.saved += 1
                    for tensor in state.values():
                        tensor.fill_(self.saved)
                    ckpt.save(self.saved, state).wait()
                    self.begun.set()
        except BaseException as error:
            self.error = error
        finally:
            self.begun.set()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def read(root: Path, *, lazily: bool) -> tuple[int, dict[str, torch.Tensor]]:
    """The step and the tensors of the newest checkpoint."""
    with open_checkpoint(root) as opened:
        if lazily:
            return opened.step, dict(opened.tensors())
        target = {name: torch.zeros(64, 64) for name in "abcdefgh"}
        return opened.load(target).step, target


def test_beside_a_job_that_keeps_one_checkpoint_every_load_is_of_one_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """None is mixed of two steps, none is taken for damaged, and no save fails."""
    trainer = Trainer(tmp_path)
    steps: set[int] = set()
    try:
        assert trainer.begun.wait(120)
        for number in itertools.count():
            if len(steps) >= 6:
                break
            with suppress(NotFoundError):  # gone, once too often, or after it has told something
                step, found = read(tmp_path, lazily=bool(number % 2))
                assert all(torch.equal(tensor, torch.full((64, 64), float(step))) for tensor in found.values())
                steps.add(step)
    finally:
        trainer.stop()
    assert trainer.error is None
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
