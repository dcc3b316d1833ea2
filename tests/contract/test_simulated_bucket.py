"""The object store keeps the contract on a simulated bucket: on a calm one, and on one that repeats requests and puts them
off, which no caller may notice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import pytest

from checkpointd.store.base import Store
from checkpointd.store.objects import store as objects
from checkpointd.store.objects.store import ObjectStore
from checkpointd.testing.contract import StoreContract
from checkpointd.testing.simbucket import Fate, SimBucket, SimClient

PART_BYTES = 100_000


class OnSimulatedBucket(StoreContract):
    WEATHER: Mapping[Fate, float] = MappingProxyType({})
    NUMBERED = False

    @pytest.fixture
    async def store(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
        monkeypatch.setattr(objects, "part_bytes_for", lambda _: PART_BYTES)
        bucket = SimBucket(weather=self.WEATHER, numbered=self.NUMBERED, page=3, retry_s=1e6)
        async with ObjectStore(SimClient(bucket)) as store:
            yield store

    test_a_read_that_is_cancelled_ends_after_what_follows_it = None
    """It needs threads; tests of the real bucket have it."""


class TestCalm(OnSimulatedBucket):
    SEED = 1


class TestRepeated(OnSimulatedBucket):
    SEED, WEATHER = 2, MappingProxyType({"repeated": 0.3, "slow down": 0.1})


class TestRepeatedNumbered(OnSimulatedBucket):
    SEED, WEATHER, NUMBERED = 3, MappingProxyType({"repeated": 0.3, "slow down": 0.1}), True
