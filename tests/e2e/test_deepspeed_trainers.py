"""Hugging Face's Trainer and Accelerate with DeepSpeed, attached by the one line: save, rotate, resume."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.e2e.deepspeed_launch import run_ranks
from tests.e2e.rank_cases import show_cases

NEEDED = ("deepspeed", "transformers", "accelerate")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {' and '.join(MISSING)}: pip install {' '.join(MISSING)}"),
]


@pytest.mark.parametrize("library", ["Trainer", "Accelerate"])
def test_those_who_make_engines_themselves_are_served(tmp_path: Path, library: str, subtests: pytest.Subtests) -> None:
    done = run_ranks(Path(__file__).with_name("deepspeed_trainers_ranks.py"), tmp_path, library)
    show_cases(subtests, tmp_path, ranks=2, output=f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
