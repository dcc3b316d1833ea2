"""What every test of a device needs."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture
def compiler(pytestconfig: pytest.Config) -> None:
    """Skip the test where the simulated device cannot be built, unless `--require-compiler` says that it must be."""
    if shutil.which("c++") is None and not pytestconfig.getoption("require_compiler"):
        pytest.skip("needs a C++ compiler, to build the simulated device")
