"""Runs each test file of `simulated/`, and those of `tests/gpu`, in a process that has the simulated device.

Those of the gate share a process, and so do the small ones: it takes long to start. Their cases show as subtests. The gate has
the files of GATE, and the night all.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).parent
FILES = sorted([*(HERE / "simulated").glob("test_*.py"), *(HERE.parent / "gpu").glob("test_*.py")])
GATE = {"test_loading", "test_mistakes", "test_staging", "test_staging_hardships"}
"""The tests of staging and loading themselves."""
SMALL = {"test_benchmark_gpu", "test_chaos", "test_device", "test_offload", "test_several_devices"}
TOGETHER = [
    *([file] for file in FILES if file.stem not in {*GATE, *SMALL}),
    *([file for file in FILES if file.stem in names] for names in (GATE, SMALL)),
]
assert {file.stem for file in FILES} >= GATE | SMALL


def marks(files: list[Path]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.nightly] if GATE.isdisjoint(file.stem for file in files) else []


def names(files: list[Path]) -> str:
    return " ".join(file.stem for file in files)


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("files", [pytest.param(files, id=names(files), marks=marks(files)) for files in TOGETHER])
def test_on_the_simulated_device(
    files: list[Path], tmp_path: Path, subtests: pytest.Subtests, pytestconfig: pytest.Config
) -> None:
    passed_on = ("mistake_rounds", "chaos_seeds", "chaos_first")
    options = [f"--{name.replace('_', '-')}={pytestconfig.getoption(name)}" for name in passed_on]
    options += ["--nightly"] * pytestconfig.getoption("nightly")
    options += ["--timeout=600"]  # the first test builds the device
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--simulated-device", *options, f"--junitxml={report}", *map(str, files)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert report.exists(), done.stdout + done.stderr
    cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        with subtests.test(case.get("name", "")):
            found = next((found for found in case if found.tag in ("failure", "error")), None)
            assert found is None, found.text if found is not None else ""
    assert cases, done.stdout
    assert done.returncode == 0, done.stdout + done.stderr
