"""A server that speaks S3, as a process of its own on loopback, with a folder that goes when it is closed."""

from __future__ import annotations

import http.client
import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.servers.child_process import ChildProcess
from tests.servers.s3_requests import Identity, send

START_S_MAX = 200.0
POLL_S = 0.02
PORTS = range(12_000, 22_000)
"""Below those that Linux gives to clients, so that none of them has a server's port when it starts again."""


class S3Server(ABC):
    """It serves when the constructor returns. `admin` may do everything; its keys are also `access_key` and `secret_key`."""

    admin = Identity("admin-key", "admin-secret")

    def __init__(self, parent: Path | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="server-", dir=parent))
        self._process: ChildProcess | None = None
        try:
            self._prepare()
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    @abstractmethod
    def endpoint(self) -> str:
        """Where it serves, as `http://127.0.0.1:12345`; the same after a restart."""

    @abstractmethod
    def _prepare(self) -> None:
        """Choose ports and write what the server reads, before its first start."""

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    @property
    def access_key(self) -> str:
        return self.admin.access_key

    @property
    def secret_key(self) -> str:
        return self.admin.secret_key

    @property
    def pid(self) -> int:
        assert self._process is not None, "it does not run"
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def _log(self) -> Path:
        return self.folder / "log"

    def said(self) -> str:
        """Its log."""
        return self._log.read_text(errors="replace")

    def start(self) -> None:
        """Start it on its folder and ports. Returns when an object was written and read back."""
        assert self._process is None, "it runs"
        until = time.monotonic() + START_S_MAX
        environment = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.folder), "GOMEMLIMIT": "256MiB"}
        self._process = ChildProcess(self._command(), folder=self.folder, log=self._log, environment=environment)
        while not self._serves():
            assert self._process.alive, f"the server ended:\n{self.said()}"
            assert time.monotonic() < until, f"the server does not serve after {START_S_MAX:g} s:\n{self.said()}"
            threading.Event().wait(POLL_S)

    def _serves(self) -> bool:
        path = "/ready/object"
        try:
            send(self.endpoint, self.admin, "PUT", "/ready")
            put = send(self.endpoint, self.admin, "PUT", path, b"yes")
            return put.status == 200 and send(self.endpoint, self.admin, "GET", path).body == b"yes"
        except (OSError, http.client.HTTPException):
            return False

    def kill(self) -> None:
        """SIGKILL: what it has not written is lost. Nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def rest(self) -> None:
        """It gets no processor time until `wake`."""
        if self.alive:
            os.kill(self.pid, signal.SIGSTOP)

    def wake(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        """SIGKILL, and a start on the same folder and ports."""
        self.kill()
        self.start()

    def make_bucket(self, name: str) -> str:
        """A new bucket; returns its name."""
        answer = send(self.endpoint, self.admin, "PUT", f"/{name}")
        assert answer.status == 200, answer
        return name

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def free_ports(count: int, *, above: Sequence[int] = (0,)) -> list[int]:
    """Ports at which nobody listens, nor at those which lie `above` them."""
    chance = random.SystemRandom()
    found: set[int] = set()
    while len(found) < count:
        port = chance.choice(PORTS)
        if all(is_free(port + step) for step in above):
            found.add(port)
    return list(found)


def is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
