"""DeepSpeed's own checkpoints, made by real engines on two gloo ranks: what is read of them is what DeepSpeed reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED, run_ranks
from tests.e2e.rank_cases import show_cases

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(300), NEEDS_DEEPSPEED]


def test_weights_and_imports_are_deepspeeds_to_the_bit(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """ZeRO 1 to 3, two groups, sub-groups, tied and frozen weights; the import goes on in engines of this and other stages."""
    done = run_ranks(Path(__file__).with_name("deepspeed_tools_ranks.py"), tmp_path)
    show_cases(subtests, tmp_path, ranks=2, output=f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}")
