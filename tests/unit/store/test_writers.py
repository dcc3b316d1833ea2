"""Whose temporary files may be swept."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpointd.store import writers


def test_this_process_is_alive_under_every_name() -> None:
    first, second = writers.new_writer(), writers.new_writer()
    assert first != second
    assert writers.is_alive(first)
    assert writers.is_alive(second)
    assert "/" not in first


@contextmanager
def _another_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that lives until the end of the block, and its name as a writer."""
    code = "import sys; from checkpointd.store.writers import new_writer; print(new_writer(), flush=True); sys.stdin.read()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()


def test_a_process_is_alive_until_it_has_ended() -> None:
    with _another_process() as (_, writer):
        assert writers.is_alive(writer)
    assert not writers.is_alive(writer)


def test_a_process_that_nobody_asked_about_after_its_end_has_ended() -> None:
    """A zombie: in a container whose first process asks about none of its children, for ever."""
    with _another_process() as (process, writer):
        assert writers.life_of(writer) == "running"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert writers.life_of(writer) == "ended"


def _replaced(part: int, value: str) -> str:
    parts = writers.new_writer().rsplit(".", 5)
    parts[part] = value
    return ".".join(parts)


@pytest.mark.parametrize(
    ("part", "value"),
    [(0, "another-host"), (1, "another-boot"), (2, "1"), (4, "12345")],
    ids=["host", "boot", "pid namespace", "start time: the pid was given again"],
)
def test_another_ones_name_is_not_alive_here(part: int, value: str) -> None:
    assert not writers.is_alive(_replaced(part, value))


@pytest.mark.parametrize("name", ["", ".", "....", "a.b.c.d.e", "host.boot.1.x.5.abc", "child", f"{2**70}.{2**70}.1.1"])
def test_what_is_no_writers_name_is_not_alive(name: str) -> None:
    assert not writers.is_alive(name)


def test_a_pid_that_cannot_exist_is_not_alive() -> None:
    assert not writers.is_alive(_replaced(3, str(2**80)))


def test_where_the_start_time_is_hidden_a_living_pid_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    name = writers.new_writer()
    monkeypatch.setattr(Path, "read_text", _hidden(Path.read_text, "/stat"))
    assert writers.is_alive(name)


def _hidden(read_text: object, ending: str) -> object:
    def read(path: Path) -> str:
        if str(path).endswith(ending):
            raise PermissionError
        return str(read_text(path))  # type: ignore[operator]

    return read
