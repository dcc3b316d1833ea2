"""The store in a bucket keeps the contract, on two servers that speak S3."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from checkpointd.store import open_store
from checkpointd.store.base import Store
from checkpointd.testing.contract import StoreContract


class TestObjectStore(StoreContract):
    @pytest.fixture
    async def store(self, s3_root: str) -> AsyncIterator[Store]:
        async with open_store(s3_root) as store:
            yield store
