"""A shard for which there is no space says how much it needs."""

from __future__ import annotations

import re

import pytest

from checkpointd.errors import StoreFullError
from checkpointd.phrases import byte_size
from checkpointd.store.base import ObjectWriter
from checkpointd.store.memory import MemoryStore
from tests.builders import plan_save, rank_arrays


class FullStore(MemoryStore):
    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        raise StoreFullError("no space is left (17 bytes are free)")


async def test_what_a_save_needs_stands_beside_what_is_free() -> None:
    save = await plan_save(FullStore())
    need = sum(array.nbytes for array in rank_arrays(1).values())
    with pytest.raises(StoreFullError, match=re.escape(f"(17 bytes are free); rank 1 has up to {byte_size(need)} to write")):
        await save.vote(1)
