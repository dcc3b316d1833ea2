"""Torchao's low-bit states under FSDP2, saved by N ranks and loaded by M, whose states are of other classes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchao.optim", reason="needs torchao: make integrations installs it")
JOB = Path(__file__).parent / "sharded_job.py"


def run(ranks: int, what: str, name: str, folder: Path) -> None:
    """One job of `ranks` ranks; each must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    others = [str(ranks), port, str(folder / "reference")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(JOB), str(folder / "root"), name, what, str(rank), *others],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    told = [job.communicate(timeout=600)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * ranks, "\n".join(told)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_states_of_two_ranks_are_resumed_exactly_and_load_on_one_and_on_four(name: str, tmp_path: Path) -> None:
    run(2, "save", name, tmp_path)
    run(2, "resume", name, tmp_path)
    for ranks in (1, 4):
        run(ranks, "compare", name, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (4, 2)])
def test_states_of_one_and_of_four_ranks_load_on_two(saved: int, loaded: int, tmp_path: Path) -> None:
    run(saved, "save", "AdamW8bit", tmp_path)
    run(loaded, "compare", "AdamW8bit", tmp_path)
