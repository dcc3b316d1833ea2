"""The runbooks of docs/RUNBOOKS.md: their commands do what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from checkpointd_client import Checkpointer, Retention, list_checkpoints
from checkpointd_client.checkpointer import core_of
from tests.logged_roots import log_state

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "RUNBOOKS.md").read_text()
needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")


def commands(runbook: str) -> str:
    """The shell commands below the heading `runbook`."""
    text = PAGE.split(f"## {runbook}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"(?ms)^ *```bash\n(.*?)^ *```$", text)
    return block


def run(runbook: str, *arguments: Path | str) -> str:
    """Run the commands as a person would, who stops at the first that fails; what they print."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euc", commands(runbook), "runbook", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest(root: Path | str) -> tuple[int | None, torch.Tensor]:
    """The step and the weight that a job which starts at `root` gets."""
    weight = torch.zeros(1 << 16)
    with Checkpointer(root) as ckpt:
        return ckpt.load({"weight": weight}).step, weight


@contextmanager
def saving(root: Path, *, files: bool = False) -> Iterator[None]:
    """A job that saves at `root` without a pause, and keeps two checkpoints."""
    stop, begun, failures = threading.Event(), threading.Event(), list[BaseException]()

    def save_on() -> None:
        try:
            with Checkpointer(root, retention=Retention(keep_last=2)) as ckpt:
                step = 0
                while not stop.is_set():
                    step += 1
                    state = {"weight": torch.full((1 << 16,), float(step))}
                    (core_of(ckpt).save_files(step, {"model.pt": state}) if files else ckpt.save(step, state)).wait(60)
                    if step == 4:
                        begun.set()
        except BaseException as error:
            failures.append(error)
            begun.set()

    job = threading.Thread(target=save_on)
    job.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        stop.set()
        job.join(60)
    assert failures == []


@needs_rsync
@pytest.mark.parametrize("files", [False, True], ids=["state", "files"])
def test_a_copy_of_a_living_root_is_whole(files: bool, tmp_path: Path) -> None:
    root, copy = tmp_path / "job" / ".checkpointd", tmp_path / "copy" / ".checkpointd"
    steps = list[int]()
    with saving(root, files=files):
        # The second run brings the same copy up to date. On a busy machine the job may remove all that the copied log names
        # before it is copied: then `verify` fails, and the page says to run it again.
        while len(steps) < 2:
            said = backed_up(root, copy)
            assert said.splitlines()[1].split()[2] == "whole"
            steps.append(int(said.splitlines()[1].split()[0].removeprefix("global_step")))
            known = {one.tag for one in log_state(copy).attempts.values()}
            newer = {path.name for path in copy.glob("global_step*")} - known
            assert all(int(tag.removeprefix("global_step")) > steps[-1] for tag in newer), "nothing stays that the job removed"
    assert 0 < steps[0] < steps[-1]
    restored = list_checkpoints(copy)[0]
    assert restored.step == steps[-1]
    if files:
        Checkpointer(copy).close()  # a start shows the files
        tag = (copy / "latest").read_text().strip()
        shown = torch.load(copy.parent / tag / "model.pt")
        assert torch.equal(shown["weight"], torch.full((1 << 16,), float(tag.removeprefix("global_step"))))
    else:
        step, weight = newest(copy)
        assert step is not None
        assert step >= steps[-1]
        assert torch.equal(weight, torch.full((1 << 16,), float(step)))


def backed_up(root: Path, copy: Path) -> str:
    """What the runbook prints once its last command finds the copy whole."""
    for _ in range(6):
        with suppress(AssertionError):
            return run("Back up a root while a job saves", root, copy)
    return run("Back up a root while a job saves", root, copy)


@needs_rsync
def test_a_root_that_was_moved_goes_on(tmp_path: Path) -> None:
    root, there = tmp_path / "old", tmp_path / "new"
    with saving(root):
        pass
    last = int((root / "latest").read_text().strip().removeprefix("global_step"))
    run("Move a root", root, there)
    assert not root.exists()
    assert_newest(there, last)


def test_a_root_that_was_moved_into_a_bucket_goes_on(seaweed_root: str, tmp_path: Path) -> None:
    root = tmp_path / "old"
    with saving(root):
        pass
    last = int((root / "latest").read_text().strip().removeprefix("global_step"))
    assert "whole" in run("Move a root into a bucket", root, seaweed_root)
    assert not root.exists()
    assert_newest(seaweed_root, last)
    with Checkpointer(seaweed_root) as ckpt:
        ckpt.load({"weight": torch.zeros(1 << 16)})
        ckpt.save(last + 1, {"weight": torch.full((1 << 16,), last + 1.0)}).wait(60)
    assert_newest(seaweed_root, last + 1)


def assert_newest(root: Path | str, step: int) -> None:
    found, weight = newest(root)
    assert found == step
    assert torch.equal(weight, torch.full((1 << 16,), float(step)))
