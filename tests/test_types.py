"""The types that a user's code sees: mypy accepts `tests/typing`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.timeout(400)
def test_user_code_type_checks() -> None:
    pytest.importorskip("mypy", reason="needs mypy: make setup installs it")
    done = subprocess.run([sys.executable, "-m", "mypy", "tests/typing"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
