"""The types that a user's code sees: mypy accepts `tests/typing`, and the Python of every page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import write_modules

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_user_code_type_checks(tmp_path: Path) -> None:
    pytest.importorskip("mypy", reason="needs mypy: make setup installs it")
    modules = [str(path) for path in write_modules(tmp_path)]
    assert len(modules) > 20
    command = [sys.executable, "-m", "mypy", "tests/typing", *modules]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
