"""Torchao's quantized weights in DTensors, saved by N ranks and loaded by M: exactly, or with an error that names them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integrations.tensor_kinds.jobs import run

pytest.importorskip("torchao.quantization", reason="needs torchao: make test-all installs it")
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
JOB = Path(__file__).parent / "weights_job.py"


@pytest.mark.parametrize(("saved", "loaded"), [(2, (2, 1, 4)), (1, (2,)), (4, (2,))])
def test_weights_come_back_on_as_many_and_on_other_ranks(saved: int, loaded: tuple[int, ...], tmp_path: Path) -> None:
    run(JOB, saved, str(tmp_path), "save", str(saved))
    for ranks in loaded:
        run(JOB, ranks, str(tmp_path), "load", str(saved))
