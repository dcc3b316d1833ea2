"""The examples on the simulated device: killed in mid-run and started again, they end bit for bit as undisturbed runs do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.accelerator.simulated.plugin import make_plugin
from tests.e2e.test_examples import DIES_AT_19, EXAMPLES, losses
from tests.faults.daemons import Daemon
from tests.faults.jobs import rank_environment, wait_until

sys.path.insert(0, str(EXAMPLES / "demo"))  # the examples import each other as scripts do

from compare import compare_runs

RANKS, STEPS, EVERY = 2, 8, 2
SMALL = ["--layers", 1, "--width", 64, "--length", 16, "--batch", RANKS, "--steps", STEPS, "--print-every", 1]

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("compiler")]


class Job:
    """Ranks of a script, each on a simulated device of its own. With a seed, its streams run in a random order."""

    def __init__(self, folder: Path, *command: object, ranks: int = RANKS, seed: int | None = None) -> None:
        folder.mkdir(exist_ok=True)
        plugin = folder / "plugin"
        environment = rank_environment(ranks)
        environment["PYTHONPATH"] = os.pathsep.join([str(plugin if plugin.exists() else make_plugin(plugin)), *sys.path])
        if seed is not None:
            environment["SIM_CHAOS"] = str(seed)
        self.printed = [folder / f"printed-{rank}" for rank in range(ranks)]
        self.processes = []
        for rank, path in enumerate(self.printed):
            with path.open("w") as out:
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self.processes.append(
                    subprocess.Popen([sys.executable, *map(str, command)], stdout=out, stderr=subprocess.STDOUT, env=own)
                )

    def codes(self) -> list[int]:
        """The exit codes, when all have ended."""
        wait_until(lambda: all(process.poll() is not None for process in self.processes), "the job has ended", limit_s=200)
        return [process.returncode for process in self.processes]

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in self.printed)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


@contextmanager
def job(folder: Path, *command: object, ranks: int = RANKS, seed: int | None = None) -> Iterator[Job]:
    running = Job(folder, *command, ranks=ranks, seed=seed)
    try:
        yield running
    finally:
        running.kill()


def finish(folder: Path, *command: object, ranks: int = RANKS, seed: int | None = None) -> str:
    """Run to the end; what rank 0 printed."""
    with job(folder, *command, ranks=ranks, seed=seed) as running:
        assert running.codes() == [0] * ranks, running.said()
        return running.printed[0].read_text()


def gpt(folder: Path, parallel: str, every: int, *more: object) -> list[object]:
    where = ["--root", folder / "checkpoints", "--out", folder / "log", "--save-every", every]
    return [EXAMPLES / "demo" / "train_gpt.py", *SMALL, "--parallel", parallel, *where, *more]


def kill_when_committed(folder: Path, command: list[object]) -> None:
    latest = folder / "checkpoints" / "latest"
    with job(folder, *command) as running:
        wait_until(lambda: latest.exists() or running.processes[0].poll() is not None, "there is a checkpoint", limit_s=200)
        running.kill()
        assert {process.returncode for process in running.processes} == {-9}, running.said()


@pytest.fixture(scope="module", params=["ddp", "fsdp2"])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The layout, and the log of a run that saves nothing."""
    folder = tmp_path_factory.mktemp(request.param)
    finish(folder, *gpt(folder, request.param, STEPS + 1))
    return request.param, folder / "log"


@pytest.mark.parametrize("sidecar", [False, True], ids=["in the trainer", "in the sidecar"])
def test_training_that_was_killed_ends_where_the_undisturbed_run_ends(
    tmp_path: Path, undisturbed: tuple[str, Path], sidecar: bool, pytestconfig: pytest.Config
) -> None:
    """Losses, parameters, moments, the schedule and the random numbers of the devices."""
    parallel, reference = undisturbed
    if sidecar != (parallel == "fsdp2") and not pytestconfig.getoption("every_load"):
        pytest.skip("each layout and each writer has its turn: ask for all pairs with --every-load")
    with Daemon(tmp_path) if sidecar else nullcontext() as daemon:
        command = gpt(tmp_path / "job", parallel, EVERY, *(["--sidecar", daemon.socket] if daemon else []))
        kill_when_committed(tmp_path / "job", command)
        printed = finish(tmp_path / "job", *command)
    assert "resumed from global_step" in printed
    comparisons = compare_runs(tmp_path / "job" / "log", reference, ranks=RANKS)
    assert [f"{c.kind} of rank {c.rank}: {name}" for c in comparisons for name in c.different] == []
    counted = {c.kind: c.values for c in comparisons if c.rank == 1}
    assert counted["losses"] == STEPS
    assert min(counted[kind] for kind in ("model", "optimizer", "scheduler", "batches", "rng")) > 0


def test_the_plain_loop_goes_on_bit_for_bit(tmp_path: Path) -> None:
    loop = EXAMPLES / "plain_loop.py"
    whole = losses(finish(tmp_path / "whole", loop, "--root", tmp_path / "a", ranks=1))
    with job(tmp_path / "killed", "-c", DIES_AT_19, loop, "--root", tmp_path / "b", ranks=1, seed=1) as running:
        assert running.codes() == [9], running.said()
    rest = finish(tmp_path / "rest", loop, "--root", tmp_path / "b", ranks=1, seed=2)
    assert "starting at step 15" in rest
    assert losses(rest) == {step: whole[step] for step in (19, 24, 29)}


def test_the_sharded_example_goes_on_under_the_other_layout_on_one_rank(tmp_path: Path) -> None:
    sharded = [EXAMPLES / "sharded.py", "--root", tmp_path / "root"]
    first = finish(tmp_path / "first", *sharded, "--parallel", "fsdp2", "--steps", 10, seed=3)
    second = finish(tmp_path / "second", *sharded, "--parallel", "ddp", "--steps", 20, ranks=1, seed=4)
    assert "1 ranks, ddp: starting at step 10" in second
    assert losses(second)[19] < losses(first)[4]  # it goes on to learn
