"""Saves that no writer takes, as the runner of this process ends them."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any, cast

import pytest

from checkpointd.errors import SidecarError
from checkpointd.layout.keys import AttemptId
from checkpointd.layout.manifest import ErrorReport
from checkpointd.pipeline.attempt import WriterState
from checkpointd.pipeline.shard import AttemptInfo, Shard, ShardProgress
from checkpointd_client.saves.history import SaveRecord
from checkpointd_client.saves.runner import REFUSED_MAX, Endings, InlineRunner, PendingSave
from checkpointd_client.staging.arena import SlotHold


class Hold:
    def __init__(self) -> None:
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


GONE = ErrorReport(code="SidecarError", message="it is gone", phase="persisting")


def pending(number: int, hold: Hold) -> PendingSave:
    info = AttemptInfo(tag=f"t{number}", attempt=AttemptId(1, 0), rank=0, world_size=1, step=number, n=number)
    staged: Future[Shard] = Future()
    staged.set_exception(SidecarError("the snapshot was not wanted"))
    return PendingSave(info, cast(SaveRecord, None), ShardProgress(), staged, cast(SlotHold, hold))


async def test_a_trainer_begins_saves_that_fail_at_once_no_faster_than_their_attempts_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A save needs a slot, so a slot that is kept keeps the next one waiting."""
    runner, ended = InlineRunner(cast(WriterState, None), cast(Endings, None)), asyncio.Event()

    async def take(*_: Any) -> None:
        await ended.wait()

    monkeypatch.setattr(runner, "take", take)
    holds = [Hold() for _ in range(REFUSED_MAX + 2)]
    async with asyncio.TaskGroup() as refused:
        for number, hold in enumerate(holds):
            refused.create_task(runner.refuse(pending(number, hold), GONE))
        for _ in range(20):
            await asyncio.sleep(0)
        assert [hold.is_released for hold in holds] == [True] * REFUSED_MAX + [False] * 2
        ended.set()
    assert all(hold.is_released for hold in holds)
