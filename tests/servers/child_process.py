"""A process that never outlives the one that started it, not even if that one is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

# PR_SET_PDEATHSIG holds across exec. The parent may have died before the call: then there is nobody to serve.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildProcess:
    """A program that writes all it says to `log`.

    Linux ends it when the thread ends that started it, not the process. So a thread starts it that only waits for its end.
    """

    def __init__(self, command: Sequence[str], *, folder: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-I", "-S", "-c", LAUNCH, str(os.getpid()), *command]
        self._folder, self._log, self._environment = folder, log, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"waits for {Path(command[0]).name}", daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self) -> None:
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=self._folder,
                    env=dict(self._environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        finally:
            self._started.set()
        self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self._command[-1]} could not be started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def kill(self) -> None:
        """SIGKILL, and its end. Nothing happens to one that has ended."""
        if self._process is not None:
            self._process.kill()
        self._thread.join()
