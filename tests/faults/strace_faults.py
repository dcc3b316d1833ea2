"""Runs a process under strace, which makes one system call on one path fail or never return. Skips tests without strace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest


def prefix(*, calls: str, on: Sequence[Path], fault: str, log: Path) -> list[str]:
    """What goes before a command line so that it runs with `fault` at its system calls `calls` on any of the paths `on`.

    A call that names its file relative to a directory's descriptor is known by that name alone, in whichever directory it is.
    """
    _skip_without_strace()
    paths = [word for path in on for name in (str(path), path.name) for word in ("-P", name)]
    return ["strace", "-f", "-o", str(log), "-e", f"trace={calls}", *paths, "-e", f"inject={calls}:{fault}"]


@contextmanager
def attached(pid: int, *, calls: str, on: Sequence[Path], fault: str, log: Path) -> Iterator[None]:
    """The same for a process that runs already, from here on; its threads and children included."""
    command = [*prefix(calls=calls, on=on, fault=fault, log=log), "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr is not None
        assert "attached" in tracer.stderr.readline()
        try:
            yield
        finally:
            tracer.terminate()


def _skip_without_strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("needs strace, to make system calls fail")
    probe = subprocess.run(["strace", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"cannot trace a process here: {probe.stderr.strip()}")
