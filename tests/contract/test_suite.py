"""The contract suite itself can fail: every store in broken_stores.py is caught, and only those."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import broken_stores

FILE = Path(broken_stores.__file__)


@pytest.mark.nightly
def test_every_broken_store_is_caught(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", str(FILE), "-o", f"python_files={FILE.name}", "-q", "-rf", "--tb=no"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--basetemp={tmp_path}/run"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    caught = set(re.findall(r"^FAILED .*?::(Test\w+)::", done.stdout, re.MULTILINE))
    assert " passed" in done.stdout, done.stdout + done.stderr
    assert caught == {f"Test{kind.__name__}" for kind in broken_stores.BROKEN}, done.stdout[-3000:]
