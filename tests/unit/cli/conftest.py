"""The command line called in-process, on roots that the real pipelines wrote."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from checkpointd.cli import run
from checkpointd.report import verification
from checkpointd.store.base import Store
from checkpointd.store.posix.store import PosixStore
from checkpointd.store.writers import new_writer

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """One finished call: exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        """What --json says of an error."""
        assert self.out == ""
        return json.loads(self.err)["error"]

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


class Cli(Protocol):
    def __call__(self, *arguments: str | Path) -> Answer: ...


class With(Protocol):
    def __call__(self, work: Callable[[Store], Awaitable[T]]) -> T: ...


@pytest.fixture(autouse=True)
def no_root_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHECKPOINTD_ROOT", raising=False)


@pytest.fixture(autouse=True)
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file server lags here: what is not there counts as lost soon."""
    monkeypatch.setattr(verification, "PATIENCE", replace(verification.PATIENCE, absence_s=0.1))


@pytest.fixture(autouse=True)
def logs_as_before() -> Iterator[None]:
    """The command line sets up the log of its whole process, which is that of the tests here."""
    logs = [logging.getLogger(), logging.getLogger("checkpointd")]
    before = [(log.level, log.handlers[:]) for log in logs]
    yield
    for log, (level, handlers) in zip(logs, before, strict=True):
        log.setLevel(level)
        log.handlers[:] = handlers


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """`checkpointd ...` in this process, its output captured: so it is no terminal."""

    def call(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "run1"
    folder.mkdir()
    return folder


@pytest.fixture
def at(root: Path) -> With:
    """Do something with the store at `root`, to its end."""

    def call(work: Callable[[Store], Awaitable[T]]) -> T:
        async def within() -> T:
            async with PosixStore(root) as store:
                return await work(store)

        return asyncio.run(within())

    return call


@pytest.fixture
def job_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts are taken by a process of this machine that is gone: this one's pid, with the start time of another."""
    place, pid, start, nonce = new_writer().rsplit(".", 3)
    monkeypatch.setattr("checkpointd.pipeline.root.starts.new_writer", lambda: f"{place}.{pid}.{int(start) + 1}.{nonce}")


@pytest.fixture
def job_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts are taken by a process of another machine."""
    monkeypatch.setattr("checkpointd.pipeline.root.starts.new_writer", lambda: "node7.0123456789ab.4026531836.17.99.cafecafe")


def contents(root: Path) -> dict[str, bytes]:
    """Every file below `root`, so that a test can say that nothing was written."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
