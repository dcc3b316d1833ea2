"""The limited store keeps the contract: around a store in memory and around a real one, at a limit that cuts writes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from checkpointd.store.base import Store
from checkpointd.store.limited import LimitedStore, TokenBucket
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing.contract import StoreContract

BYTES_PER_S = 200e6


class TestLimitedMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        async with LimitedStore(MemoryStore(), TokenBucket(BYTES_PER_S)) as store:
            yield store


class TestLimitedPosixStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with LimitedStore(PosixStore(tmp_path), _small_pieces()) as store:
            yield store


def _small_pieces() -> TokenBucket:
    """Fast, and yet in pieces of 64 KiB, so that most writes of the suite are cut."""
    bucket = TokenBucket(BYTES_PER_S)
    bucket.piece_bytes = 64 * 1024
    return bucket
