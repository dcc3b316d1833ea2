"""Starts as records of the log: no number is taken twice, and a job that is not among them is fenced."""

from __future__ import annotations

import pytest

from checkpointd.errors import DamagedError, FencedError, NotFoundError, UsageError
from checkpointd.layout.log_records import BEGINS_MAX, AnnounceRecord, entry_key
from checkpointd.pipeline.root import own_root, starts
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.own_root import OwnRoot
from checkpointd.store.identity import Identity
from checkpointd.store.memory import MemoryStore

SPARED = "global_step7/00000001-0"


async def test_a_start_that_was_stopped_does_not_begin_a_start_again() -> None:
    store = MemoryStore()
    for _ in range(3):
        await starts.take(store, 1)
    assert await starts.begin(store, starts.new(store, 3)) is None
    assert (await starts.take(store, 1)).start == 4
    assert await starts.begin(store, starts.new(store, 6)) is not None  # one beyond the next is as good
    assert await starts.newest(store) == 6


class Folding(MemoryStore):
    """A store that takes capitals for small letters, and says where it lies."""

    async def identity(self, key: str) -> Identity | None:
        if await self.stat(key.lower()) is None:
            raise NotFoundError(key)
        return Identity(device=1, number=2, object_touched_ns=3)

    def forget_synced(self) -> None:
        """It remembers nothing of that kind."""


async def test_no_start_begins_where_names_that_differ_in_case_are_one() -> None:
    """Two tags would share a directory, and their attempts would have one name."""
    store = Folding()
    with pytest.raises(UsageError, match="does not tell small letters from capitals"):
        await starts.take(store, 1)
    assert (await RootLog.of(store).look()).number == 0


async def test_start_1_an_attempt_is_spared_only_while_each_start_spares_it() -> None:
    store = MemoryStore()
    await starts.take(store, 1)
    assert await RootLog.of(store).add(AnnounceRecord(attempt=SPARED, n=0, step=7)) == ""
    for _ in range(2):
        assert (await starts.take(store, 1, [SPARED])).spared == (SPARED,)
        await starts.check_fence(store, 1, SPARED)
        await starts.check_not_over(store, 1)
    await starts.take(store, 1)
    assert (await starts.take(store, 1, [SPARED])).spared == ()
    with pytest.raises(FencedError):
        await starts.check_fence(store, 1, SPARED)
    with pytest.raises(FencedError):
        await starts.check_not_over(store, 1)


async def test_a_job_of_whose_start_the_log_does_not_tell_any_more_is_told_that_it_is_fenced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(own_root, "ABSENCE_S", 0.01)
    store = MemoryStore()
    first = await starts.take(store, 1)
    for _ in range(BEGINS_MAX):
        await starts.take(store, 1)
    with pytest.raises(NotFoundError):
        await starts.read(store, 1)
    root = OwnRoot(store)
    root.expect(1, first.nonce)
    with pytest.raises(FencedError, match=rf"taken over .*: start {BEGINS_MAX + 1}, by .* This job is start 1,"):
        await root.check(1)


async def test_a_damaged_log_tells_of_no_start() -> None:
    store = MemoryStore()
    await starts.take(store, 1)
    await store.put(entry_key(RootLog.of(store).state.number + 2), b"{")
    for asked in (starts.newest(store), starts.check_fence(store, 1), starts.read(store, 1)):
        with pytest.raises(DamagedError, match="cannot be read to its end"):
            await asked
