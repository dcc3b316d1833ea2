"""What all tests of mirrors share."""

from __future__ import annotations

import pytest

from checkpointd.mirror import copying


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file server lags here."""
    monkeypatch.setattr(copying, "RETRY_S", 1.0)
