"""The pace that the governor sets reaches the writer, here or in the sidecar, and those who wait lift it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from checkpointd.commit.machine import Phase
from checkpointd.pipeline.pace import Pace
from checkpointd.pipeline.shard import ShardProgress
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.saves.handle import SaveHandle

STATE: dict[str, object] = {"w": torch.arange(1 << 16, dtype=torch.float32)}


def handle_of(pace: Pace) -> SaveHandle:
    return SaveHandle("t", "00000001-0", 1, ShardProgress(pace=pace))


def test_a_save_at_a_lower_pace_rests_and_says_so(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, compression="none", chunk_bytes=1 << 16) as ckpt:
        core_of(ckpt)._saver.governor.share = 0.5
        core_of(ckpt)._saver.governor.overhead = 0.25
        handle = ckpt.save(1, STATE)
        handle._wait(handle.done, 60)  # not wait(), which lifts the pace
        assert handle.timings.rested_s == handle.pace.rested_s > 0
        assert handle.timings.overhead == 0.25
        status = ckpt.status()
        assert (status.overhead, status.pace) == (0.25, 0.5)
        assert [(one.pace, one.rested_s) for one in status.attempts] == [(0.5, handle.pace.rested_s)]


def test_a_save_that_somebody_waits_for_rests_no_more() -> None:
    for wait in (
        lambda handle: handle.wait("committed"),
        lambda handle: handle.ended_within(1.0),
        lambda handle: asyncio.run(handle._awaited()),
    ):
        pace = Pace(share=0.5)
        handle = handle_of(pace)
        handle.advance(Phase.COMMITTED)
        wait(handle)  # type: ignore[no-untyped-call]  # a lambda
        assert pace.reason == "awaited"
        assert pace.rest_after(1.0, None) == 0.0


def test_who_waits_for_the_snapshot_changes_nothing() -> None:
    pace = Pace(share=0.5)
    handle = handle_of(pace)
    handle.advance(Phase.STAGED)
    handle.wait("staged")
    assert pace.rest_after(0.01, None) == pytest.approx(0.01)


def test_steps_of_an_optimizer_are_counted(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(3)
    with Checkpointer(tmp_path) as ckpt:
        for _ in range(5):
            optimizer.step()
        assert len(core_of(ckpt)._saver.governor._undisturbed) == 4
