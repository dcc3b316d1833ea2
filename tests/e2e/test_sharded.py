"""Every layout into every layout, on every number of ranks: real gloo ranks, which are started once for all of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.exports import wrong_exports
from tests.e2e.rank_cases import output_of, show_cases, start_ranks
from tests.e2e.sharded_models import DTYPES
from tests.e2e.sharded_ranks import FEW_DTYPES, PROCESSES
from tests.faults.daemons import Daemon

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path) as daemon:
        yield daemon


@pytest.mark.parametrize("amount", ["few", pytest.param("many", marks=pytest.mark.nightly)])
def test_whatever_was_saved_loads_wherever(
    tmp_path: Path, daemon: Daemon, request: pytest.FixtureRequest, amount: str, subtests: pytest.Subtests
) -> None:
    """The matrix of worlds, layouts and dtypes; ranks that disagree; restarts beside a sidecar; exports."""
    if amount == "many" and request.config.getoption("--every-load"):
        amount = "all"
    script = Path(__file__).with_name("sharded_ranks.py")
    ranks = start_ranks(script, tmp_path, PROCESSES, amount, SIDECAR=str(daemon.socket))
    show_cases(subtests, tmp_path, PROCESSES, output_of(ranks, limit_s=1700))
    with subtests.test("exports"):
        saved = ((2,), FEW_DTYPES) if amount == "few" else ((2, 3), DTYPES)
        assert list(wrong_exports(tmp_path, *saved)) == []
