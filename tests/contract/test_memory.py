"""The memory store keeps the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.testing.contract import StoreContract


class TestMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        async with MemoryStore() as store:
            yield store
