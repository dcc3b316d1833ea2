"""A process that has imported the slow modules, and forks the ranks of jobs without importing them again.

`rank_forker_process.py` is that process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self


class ForkedRank:
    """A rank: of a subprocess.Popen, what tests use. `errors` is where it writes its standard error."""

    def __init__(self, path: Path, environment: dict[str, str], errors: BinaryIO) -> None:
        commands, self_commands = os.pipe()
        self_answers, answers = os.pipe()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(str(path))
            socket.send_fds(line, [json.dumps(environment).encode() + b"\n"], [commands, answers, errors.fileno()])
            self._news = line.makefile("r")
        os.close(commands)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(self_commands, "w"), os.fdopen(self_answers)
        self.pid = int(self._news.readline())
        self._code: int | None = None

    def wait(self) -> int:
        """Its exit code, once it has ended; that of a signal is negative."""
        if self._code is None:
            self._code = int(self._news.readline())
            self._news.close()
        return self._code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class RankForker:
    """The process that forks ranks of the class `Rank` in `module`, whose methods are their commands; ready when made.

    It ends when this process does, at the latest.
    """

    def __init__(self, folder: Path, module: str, **environment: str) -> None:
        self.socket = folder / "rank_forker"
        self._log = folder / "rank_forker.log"
        paths = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rank_forker_process.py")), module, str(self.socket)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **paths, **environment},
            )
        assert self._process.stdout is not None
        while (said := self._process.stdout.readline()) != b"ready\n":
            assert said, f"it has ended: {self._log.read_text()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
