"""Jobs of two ranks on the simulated device, which are started once for all of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rank_cases import output_of, show_cases, start_ranks

PROCESSES = 2  # a process that imports device_ranks.py would have the device for good

pytestmark = [pytest.mark.nightly, pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("compiler")]


def test_every_layout_trains_saves_and_loads_on_devices(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Bit for bit as in host memory, on the same and on another number of ranks; and what the layouts do not reach."""
    ranks = start_ranks(Path(__file__).with_name("device_ranks.py"), tmp_path, PROCESSES)
    show_cases(subtests, tmp_path, PROCESSES, output_of(ranks, limit_s=250))
