"""DeepSpeed engines as boxes: every ZeRO stage into every other on 1 to 4 gloo ranks, which are started once for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.deepspeed_launch import NEEDS_DEEPSPEED
from tests.e2e.forked_ranks import run_forked
from tests.e2e.rank_cases import show_cases

PROCESSES = 4

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    NEEDS_DEEPSPEED,
]


def test_whatever_an_engine_saved_loads_at_any_stage_and_number_of_ranks(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Bit for bit, against DeepSpeed's own view of parameters, masters and states; plain models; parts of a checkpoint."""
    done = run_forked(Path(__file__).with_name("deepspeed_boxes_ranks.py"), tmp_path, limit_s=350)
    show_cases(subtests, tmp_path, PROCESSES, done.stderr)
