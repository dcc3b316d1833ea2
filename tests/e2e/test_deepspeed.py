"""Real DeepSpeed engines on two gloo ranks, which are started once for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED
from tests.e2e.forked_ranks import run_forked
from tests.e2e.rank_cases import show_cases

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), NEEDS_DEEPSPEED]


def test_engines_save_in_deepspeeds_own_files(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """ZeRO 0 to 3 in fp32 and bf16 against DeepSpeed's own saving; ranks that differ, fail, or are alone."""
    done = run_forked(Path(__file__).with_name("deepspeed_ranks.py"), tmp_path, limit_s=1700)
    show_cases(subtests, tmp_path, ranks=2, output=done.stderr)
