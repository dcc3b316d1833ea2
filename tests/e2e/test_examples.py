"""Each example runs, and goes on from where it was. The session in PARALLEL.md runs sharded.py and evaluate.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from checkpointd.bucket_urls import parse
from checkpointd_client import Checkpointer
from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED
from tests.faults.daemons import Daemon, OwnDaemons

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = ("plain_loop.py", "sharded.py", "deepspeed_zero.py", "evaluate.py", "bucket_loop.py")

pytestmark = [pytest.mark.e2e]


def run(script: str, *arguments: object, ranks: int = 0) -> str:
    """What it prints: in one process, or under torchrun on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


def losses(printed: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in re.findall(r"^step +(\d+)  loss ([\d.]+)", printed, re.MULTILINE)}


def test_the_examples_are_these_and_short() -> None:
    found = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert set(found) == set(SCRIPTS)
    assert max(found.values()) < 100
    assert [name for name in found if f"({name})" not in (EXAMPLES / "README.md").read_text()] == []
    parallel = (EXAMPLES.parent / "docs/PARALLEL.md").read_text()
    assert all(f" examples/{name} " in parallel for name in ("sharded.py", "evaluate.py"))


@pytest.mark.nightly
def test_the_plain_loop_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Dropout, the schedule and the loader as well."""
    whole = losses(run("plain_loop.py", "--root", tmp_path / "whole"))
    assert list(whole) == [4, 9, 14, 19, 24, 29]
    assert whole[29] < whole[4] / 2  # it learns
    killed = [sys.executable, "-c", DIES_AT_19, EXAMPLES / "plain_loop.py", "--root", tmp_path / "parts"]
    assert subprocess.run(killed, timeout=180, check=False).returncode == 9
    rest = run("plain_loop.py", "--root", tmp_path / "parts")
    assert "starting at step 15" in rest
    assert losses(rest) == {step: whole[step] for step in (19, 24, 29)}


DIES_AT_19 = """
import os, runpy, sys
from checkpointd_client import Checkpointer

save = Checkpointer.save

def save_and_die(self, step, *arguments, **options):
    if step == 19:
        os._exit(9)
    handle = save(self, step, *arguments, **options)
    handle.wait()
    return handle

Checkpointer.save = save_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.nightly
@NEEDS_DEEPSPEED
def test_the_deepspeed_example_goes_on_at_another_stage(tmp_path: Path) -> None:
    first = run("deepspeed_zero.py", "--save_dir", tmp_path, "--stage", 2, "--steps", 10, ranks=2)
    second = run("deepspeed_zero.py", "--save_dir", tmp_path, "--stage", 1, "--steps", 20, ranks=1)
    assert "1 ranks, stage 1: starting at step 10" in second
    assert losses(second)[19] < losses(first)[4] / 2  # it goes on to learn


@pytest.mark.nightly
def test_every_checkpoint_is_evaluated_or_named(tmp_path: Path) -> None:
    """Those that came between two looks as well. One was removed by retention, and one is damaged."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    with Checkpointer(tmp_path, retention=3) as ckpt:
        for step in range(4):
            for parameter in model.parameters():
                nn.init.normal_(parameter)
            ckpt.save(step, {"model": model}, metrics={"loss": step}, tag=f"s{step}").wait()
    assert not list(tmp_path.glob("s0/*/*.chunks"))
    next(tmp_path.glob("s2/*/*.chunks")).write_bytes(b"damage")
    printed = run("evaluate.py", "--root", tmp_path, "--until", 3).splitlines()
    assert [line.split()[1] for line in printed] == ["0", "1", "2", "3"]
    assert [" loss " in line for line in printed] == [False, True, False, True]
    assert "skipped: retention" in printed[0]
    assert "skipped: " in printed[2]


def printed_until(process: subprocess.Popen[str], line: str) -> str:
    """What `process` prints up to the line that begins so."""
    assert process.stdout is not None
    printed = ""
    for printed_line in process.stdout:
        printed += printed_line
        if printed_line.startswith(line):
            return printed
    raise AssertionError(f"{line!r} was never printed: {printed}")


@pytest.mark.nightly
def test_the_loop_in_a_bucket_goes_on_from_the_spool(
    seaweed_root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is uploaded before the loop and the sidecar are killed; then all of it is."""
    place, _, options = seaweed_root.partition("?")
    root = f"{place}/run1?{options}"
    with OwnDaemons(monkeypatch):
        whole = losses(run("bucket_loop.py", "--root", f"{place}/whole?{options}", "--spool", tmp_path / "own"))
    assert list(whole) == [4, 9, 14, 19, 24, 29]
    spool = ("--spool", str(tmp_path / "spool"))
    with Daemon(tmp_path, *spool, "--spool-bandwidth-mib", "0.001", root=seaweed_root) as daemon:
        assert f"listening at {daemon.socket} for {parse(seaweed_root).url}\n" in daemon.said()
        command = [sys.executable, EXAMPLES / "bucket_loop.py", "--root", root, "--sidecar", daemon.socket]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
            printed_until(first, "step    9")
            first.kill()
        daemon.kill()
        daemon.start_again(spool)
        rest = run("bucket_loop.py", "--root", root, "--sidecar", daemon.socket)
    assert re.search(r"starting at step (10|15), from the spool", rest)
    assert losses(rest).items() <= whole.items()
    assert 29 in losses(rest)
    assert "global_step29" in command_line("list", root)


def command_line(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "checkpointd", *arguments], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
