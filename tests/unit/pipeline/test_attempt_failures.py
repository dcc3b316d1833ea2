"""A save whose storage fails, or that not all ranks join, ends for every rank, and the next save works."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from typing_extensions import Buffer

from checkpointd.commit.machine import Phase
from checkpointd.errors import (
    CheckpointdError,
    DeadlineError,
    StoreError,
    StoreFullError,
)
from checkpointd.pipeline.root import root_view
from checkpointd.store.base import ObjectWriter
from checkpointd.store.memory import MemoryStore
from checkpointd.store.posix.store import PosixStore
from checkpointd.testing import simloop
from tests.builders import plan_save, save_checkpoint

LONG_S = 3600.0
"""A deadline that no test waits for: what is known before it is known at once."""


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    return PosixStore(tmp_path / "root")


class FaultyWriter:
    """An object writer whose nth write fails; the rest pass."""

    def __init__(self, inner: ObjectWriter, failing_write: int, error: CheckpointdError) -> None:
        self._inner, self._left, self._error = inner, failing_write, error

    async def write_at(self, offset: int, data: Buffer) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error
        await self._inner.write_at(offset, data)

    async def finish(self, size: int) -> None:
        await self._inner.finish(size)

    async def discard(self) -> None:
        await self._inner.discard()


class FaultyStore(PosixStore):
    """A store on which the nth write of every chunks object fails while `failing_write` is set."""

    failing_write = 0
    error: CheckpointdError = StoreFullError("no space is left on the disk")

    async def open_writer(self, key: str, *, size_hint: int = 0, size_max: int = 0) -> ObjectWriter:
        inner = await super().open_writer(key, size_hint=size_hint, size_max=size_max)
        return FaultyWriter(inner, self.failing_write, self.error) if self.failing_write else inner


async def test_a_storage_error_does_not_spoil_the_saves_after_it(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "root")
    store.failing_write = 1
    failed = await save_checkpoint(store, tag="global_step1", timeout_s=LONG_S)
    assert {a.phase for a in failed} <= {Phase.FAILED, Phase.ABORTED}
    store.failing_write = 0
    worked = await save_checkpoint(store, tag="global_step2", timeout_s=LONG_S)
    assert [a.phase for a in worked] == [Phase.COMMITTED, Phase.COMMITTED]
    assert await root_view.latest(store) == "global_step2"


async def test_one_ranks_error_is_every_ranks_answer_long_before_the_deadline(store: PosixStore) -> None:
    plan = await plan_save(store, world_size=3, timeout_s=LONG_S, failing={2: StoreError("the disk of rank 2 is on fire")})
    attempts = await asyncio.gather(*(plan.run(rank) for rank in range(3)))
    assert [a.phase for a in attempts] == [Phase.ABORTED, Phase.ABORTED, Phase.FAILED]
    for attempt in attempts:
        assert type(attempt.error) is StoreError
        assert attempt.error.ranks == (2,)
        assert "rank 2 failed while staging: the disk of rank 2 is on fire" in str(attempt.error)
    assert len({str(a.outcome) for a in attempts}) == 1


@pytest.mark.parametrize(
    ("method", "failing", "phases"),
    [
        pytest.param("put_if_match", {}, [Phase.COMMITTED, Phase.COMMITTED], id="while `latest` moves"),
        pytest.param("delete", {1: StoreError("I/O error")}, [Phase.ABORTED, Phase.FAILED], id="while leftovers go"),
    ],
)
async def test_attempt_1_an_unforeseen_error_of_the_store_ends_no_attempt_in_another_phase(
    store: PosixStore, method: str, failing: dict[int, Exception], phases: list[Phase], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def defective(*_: object) -> None:
        raise RuntimeError("a defect of the store")

    monkeypatch.setattr(store, method, defective)
    attempts = await save_checkpoint(store, world_size=2, timeout_s=LONG_S, failing=failing)
    assert [attempt.phase for attempt in attempts] == phases


def test_a_save_that_not_all_ranks_call_ends_at_the_deadline_and_names_the_missing() -> None:
    async def main() -> None:
        store, loop = MemoryStore(), asyncio.get_running_loop()
        plan = await plan_save(store, world_size=4, timeout_s=2.0)
        attempts = await asyncio.gather(*(plan.run(rank) for rank in (0, 2)))
        assert 2.0 <= loop.time() < 3.0
        for attempt in attempts:
            assert attempt.phase is Phase.ABORTED
            assert isinstance(attempt.error, DeadlineError)
            assert attempt.error.ranks == (1, 3)
            assert "every rank must call save()" in str(attempt.error)
        later = await save_checkpoint(store, tag="global_step2", world_size=4)
        assert {a.phase for a in later} == {Phase.COMMITTED}

    simloop.run(1, main())


async def test_one_write_of_many_that_finds_no_space_fails_the_save(tmp_path: Path) -> None:
    store = FaultyStore(tmp_path / "root")
    store.failing_write = 2
    store.error = StoreFullError(f"no space: {errno.ENOSPC}")
    failed = await save_checkpoint(store, timeout_s=LONG_S)
    assert all("no space" in str(a.error) for a in failed)
    assert not await root_view.checkpoints(store)
    assert not list((tmp_path / "root").rglob("*.chunks"))
