"""The accelerator that is there; with `--simulated-device`, the simulated one. Without either, the tests here are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpointd_client.selftest.clock import Clock
from checkpointd_client.selftest.lateness import Late, LateByWork, Work

WORK_BYTES = 128 << 20


@pytest.fixture
def device(pytestconfig: pytest.Config) -> torch.device:
    if pytestconfig.getoption("simulated_device"):
        from tests.accelerator.simulated import plugin

        plugin.load()
    elif not torch.accelerator.is_available():
        pytest.skip(f"there is no accelerator; torch {torch.__version__} sees none")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    torch.accelerator.set_device_index(0)
    return torch.device(found.type, 0)


@pytest.fixture
def nbytes(device: torch.device) -> int:
    """Bytes of a large tensor: more than checkpointd gathers, and on real hardware enough for a copy to take its time."""
    return 512 << 10 if device.type == "sim" else 32 << 20


@pytest.fixture
def late(device: torch.device) -> Late:
    if device.type == "sim":
        from tests.accelerator.simulated import simulator
        from tests.accelerator.simulated.late_streams import LateByHolding

        return LateByHolding(simulator, device)
    return LateByWork(Work(Clock(device), WORK_BYTES))


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)
