from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from checkpointd.store.base import Store
from checkpointd.store.posix import PosixStore
from checkpointd.testing.contract import StoreContract


class TestPosixStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with PosixStore(tmp_path / "not" / "yet" / "there") as store:
            yield store
