"""Runs a script as a job of several ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path


def run(script: Path, ranks: int, *arguments: str, after: tuple[str, ...] = ()) -> None:
    """Run `script ARGUMENTS RANK RANKS PORT AFTER` on every rank; each must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    jobs = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments, str(rank), str(ranks), port, *after],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    told = [job.communicate(timeout=600)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0] * ranks, "\n".join(told)
