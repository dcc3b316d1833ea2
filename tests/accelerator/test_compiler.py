"""Continuous integration builds the simulated device, and fails where it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

RUN = Path(__file__).resolve().parents[2] / ".ci" / "run"


def test_continuous_integration_requires_the_compiler(tmp_path: Path) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ARGS": "-k device"}
    done = subprocess.run([RUN], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "test|ARGS=--require-compiler -k device|"
