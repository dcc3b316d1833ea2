"""The simulated device as a fixture; `../README.md` says what it is. The tests run in `test_in_own_process.py`."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """With the device in it, a process has an accelerator for good, which other tests must not see."""
    return None if config.getoption("simulated_device") else True


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """The module that controls the device."""
    from tests.accelerator.simulated import plugin, simulator

    plugin.load()
    return simulator


@pytest.fixture
def device(sim: ModuleType) -> torch.device:
    return torch.device("sim", 0)
