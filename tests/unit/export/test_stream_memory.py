"""STREAM-1 of export/stream.py: what an export holds is bounded, and small beside the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
MODEL_MIB = 448
pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("stream memory")]  # one process, so that the model is saved once
SLACK = 40 * MIB
"""What an interpreter takes for itself meanwhile: thread stacks, free lists, indexes."""


def child(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("export_child.py"), *arguments],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("export") / "root"
    child("save", place, str(MODEL_MIB))
    return place


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("name", ["out", "out.pt"])
def test_stream_1_memory_stays_far_below_the_model(root: Path, tmp_path: Path, name: str, dtype: str) -> None:
    grown = int(child("export", root, tmp_path / name, f'{{"dtype": "{dtype}", "memory_bytes": {64 * MIB}}}'))
    assert grown < 64 * MIB + SLACK < MODEL_MIB * MIB // 4


def test_stream_1_the_measure_sees_memory_where_it_is_taken(root: Path, tmp_path: Path) -> None:
    grown = int(child("export", root, tmp_path / "out", f'{{"memory_bytes": {1024 * MIB}}}'))
    assert grown > 64 * MIB + SLACK
