"""What every test of a device needs."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture
def compiler() -> None:
    """Skip the test where the simulated device cannot be built."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, to build the simulated device")
