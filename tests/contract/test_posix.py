"""The POSIX store keeps the contract: on the file systems at hand, and among processes that race for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing.contract import StoreContract

RACING_PROCESS = Path(__file__).with_name("racing_process.py")
PROCESSES = 4


class TestPosixStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with PosixStore(tmp_path / "not" / "yet" / "there") as store:
            yield store


class Racer:
    """One process at one root; see racing_process.py."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, step: str, *arguments: str | int | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([step, *arguments]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> object:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the racer ended with exit status {self._process.wait()}"
        return json.loads(line)


@contextmanager
def racing(root: Path) -> Iterator[Racer]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(RACING_PROCESS), str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield Racer(process)
        finally:
            process.kill()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def racers(root: Path) -> Iterator[list[Racer]]:
    """Processes at one root that none of them has made yet."""
    with ExitStack() as stack:
        racers = [stack.enter_context(racing(root)) for _ in range(PROCESSES)]
        assert [racer.answer() for racer in racers] == ["ready"] * PROCESSES
        yield racers


def test_store_1_one_of_the_racing_processes_creates(root: Path, racers: list[Racer]) -> None:
    """The directories are part of the race: each round has new ones."""
    for turn in range(40):
        for n, racer in enumerate(racers):
            racer.start("create", f"tag{turn}/attempt/outcome", f"process {n}" * 100)
        won = [racer.answer() for racer in racers]
        assert won.count(True) == 1, (turn, won)
        assert (root / f"tag{turn}/attempt/outcome").read_text() == f"process {won.index(True)}" * 100
    assert list((root / ".checkpointd/tmp").iterdir()) == []


def test_store_1_store_2_a_reading_process_sees_nothing_torn(root: Path, racers: list[Racer]) -> None:
    racers[-1].start("watch", "seen", "seen.end")
    current, written = None, set()
    for turn in range(20):
        bodies = [f"{turn}.{n} " * (20_000 + n) for n in range(PROCESSES - 1)]
        for racer, body in zip(racers, bodies, strict=False):
            racer.start("replace", "seen", current, body)
        won = [racer.answer() for racer in racers[:-1]]
        assert won.count(True) == 1, (turn, won)
        current = bodies[won.index(True)]
        written.add(current)
    racers[0].start("create", "seen.end", "")
    assert racers[0].answer() is True
    seen = _strings(racers[-1].answer())
    assert seen
    assert set(seen) <= written


def test_store_2_no_update_of_a_process_is_lost(root: Path, racers: list[Racer]) -> None:
    root.mkdir()
    (root / "counter").write_text("0")
    for racer in racers:
        racer.start("count_up", "counter", 15)
    for racer in racers:
        racer.answer()
    assert (root / "counter").read_text() == str(15 * PROCESSES)


def test_store_5_processes_create_in_a_directory_that_others_empty(root: Path, racers: list[Racer]) -> None:
    for n, racer in enumerate(racers):
        racer.start("come_and_go", "shared/deep/er", str(n), 40)
    assert [racer.answer() for racer in racers] == [40] * PROCESSES
    assert not (root / "shared").exists()


def _strings(answer: object) -> list[str]:
    assert isinstance(answer, list)
    return [str(item) for item in answer]
