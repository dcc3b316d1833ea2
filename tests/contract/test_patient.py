"""The patient store keeps the contract: around a store in memory and around a real one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from checkpointd.store.base import Store
from checkpointd.store.memory import MemoryStore
from checkpointd.store.patient import Patience, PatientStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing.contract import StoreContract


class TestPatientMemoryStore(StoreContract):
    @pytest.fixture
    async def store(self) -> AsyncIterator[Store]:
        async with PatientStore(MemoryStore(), Patience(retry_s=60.0, absence_s=0.0)) as store:
            yield store


class TestPatientPosixStore(StoreContract):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[Store]:
        async with PatientStore(PosixStore(tmp_path), Patience(retry_s=60.0, absence_s=0.0)) as store:
            yield store
