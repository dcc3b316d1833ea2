"""Test cases inside a job: each rank records the failures of each case, and the test shows each case as a subtest."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest  # which the ranks do not need

FINISHED = "the rank has finished"


class CaseNotes:
    """What one rank notes: after each case a line of JSON, its name and what is wrong in it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = _path(folder, rank)
        self.wrong: list[str] = []
        """What is wrong in this case so far."""

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Run one case; an exception is noted as well, and ends the rank."""
        self.wrong = []
        try:
            yield
        except BaseException:
            self.wrong.append(traceback.format_exc())
            raise
        finally:
            self._note(name)

    def finish(self) -> None:
        """Note that all cases were run."""
        self.wrong = []
        self._note(FINISHED)

    def _note(self, name: str) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([name, self.wrong]) + "\n")


_LEFT: list[object] = []


def leave_process_group() -> None:
    """As `destroy_process_group`, but the memory of the groups stays: freeing a gloo group sometimes waits, until its own
    time-out, for a thread that waits for ranks which have left.
    """
    import torch.distributed as dist

    _LEFT.extend(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()


def start_ranks(script: Path, folder: Path, count: int, *arguments: str, **environment: str) -> list[subprocess.Popen[str]]:
    """Processes of `script FOLDER NUMBER ARGUMENTS...`, which say on a SIGABRT where they are."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    return [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(number), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )
        for number in range(count)
    ]


def output_of(ranks: list[subprocess.Popen[str]], limit_s: float) -> str:
    """The end of what each of the ranks wrote, once all have ended. If one fails, or none has ended in time, all are killed."""
    from tests.faults.jobs import wait_until  # not on the ranks, which import this module

    try:
        # The one that ends first is the one to ask: the others wait for it, or have ended as well.
        with suppress(AssertionError):
            wait_until(lambda: any(rank.poll() is not None for rank in ranks), "a rank has ended", limit_s=limit_s)
        is_late = all(rank.poll() is None for rank in ranks)
        if is_late or any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.send_signal(signal.SIGABRT)
        said = "\n".join(rank.communicate(timeout=60)[0][-8000:] for rank in ranks)
        assert not is_late, f"no rank has ended within {limit_s:g} s\n{said}"
        return said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def show_cases(subtests: pytest.Subtests, folder: Path, ranks: int, output: str = "") -> None:
    """A subtest for each case of each rank, and one for its end. `output` is shown with a rank that did not get to its end."""
    for rank in range(ranks):
        cases = noted_cases(folder, rank)
        for name, wrong in cases:
            if name != FINISHED:
                with subtests.test(name, rank=rank):
                    assert not wrong, "\n".join(wrong)
        with subtests.test(FINISHED, rank=rank):
            last = cases[-1][0] if cases else "none"
            assert last == FINISHED, f"its last case is {last}\n{output}"
            assert len(cases) > 1, "it ran no case"


def noted_cases(folder: Path, rank: int) -> list[tuple[str, list[str]]]:
    """The cases that a rank has ended, and what is wrong in each."""
    path = _path(folder, rank)
    return [(name, wrong) for name, wrong in map(json.loads, path.read_text().splitlines())] if path.exists() else []


def _path(folder: Path, rank: int) -> Path:
    return folder / f"cases-{rank}.jsonl"
