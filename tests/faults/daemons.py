"""The sidecar as a real process, for tests that kill, stop and start it again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest


class Daemon:
    """`checkpointd serve` for the roots at or below `root`, by default `folder`; listening when the constructor returns."""

    def __init__(self, folder: Path, *options: str, name: str = "sidecar", root: str | None = None) -> None:
        self.socket = folder / name / "socket"
        self._root, self._options = root or str(folder), options
        self._log = folder / f"{name}.log"
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "checkpointd", "serve", "--socket", str(self.socket), "--root", self._root]
        command += ["--uid", str(os.geteuid())]  # root has to be named
        with self._log.open("a") as log:
            process = subprocess.Popen(
                [*command, *self._options], stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready at "), f"the sidecar did not start ({process.wait()}):\n{self.said()}"
        return process

    def said(self) -> str:
        """Its log."""
        return self._log.read_text()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.process.kill()
        self._end()

    def start_again(self, options: Sequence[str] | None = None) -> None:
        """A new process at the same socket."""
        if options is not None:
            self._options = tuple(options)
        self.process = self._start()

    def _end(self) -> int:
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def terminate(self) -> int:
        """SIGTERM; its exit code."""
        self.process.terminate()
        return self._end()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class OwnDaemons:
    """The daemons that trainers start with sidecar="auto" while this is open; they are killed at the end.

    Their sockets lie in a directory with a short name, since the path of a socket has 107 bytes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="own-"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(self.folder))

    def pids(self) -> list[int]:
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            try:
                words = (place / "cmdline").read_bytes().split(b"\0")
                has_ended = (place / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if b"serve" in words and any(word.startswith(f"{self.folder}/".encode()) for word in words) and not has_ended:
                found.append(int(place.name))
        return found

    def the_one(self) -> int:
        (pid,) = self.pids()
        return pid

    def kill(self) -> None:
        """SIGKILL to each, and their ends."""
        pause = threading.Event()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pause.wait(0.002)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        shutil.rmtree(self.folder)
