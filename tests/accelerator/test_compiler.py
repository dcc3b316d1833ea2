"""Continuous integration builds the simulated device, and fails where it cannot."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).resolve().parents[2] / ".ci"


@pytest.mark.parametrize(("script", "verb"), [("run", "test"), ("night", "test-all")])
def test_continuous_integration_requires_the_compiler(tmp_path: Path, script: str, verb: str) -> None:
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    make.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "ARGS": "-k device"}
    done = subprocess.run([CI / script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{verb}|ARGS=--require-compiler -k device|"
