"""The pace that the governor sets reaches the writer, here or in the sidecar, and those who wait lift it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from checkpointd.commit.machine import Phase
from checkpointd.errors import SkippedError, StoreError, UsageError
from checkpointd.pipeline.pace import Pace
from checkpointd.pipeline.shard import ShardProgress
from checkpointd_client import Checkpointer
from checkpointd_client.checkpointer import core_of
from checkpointd_client.saver import asked
from checkpointd_client.saves.handle import OwnHandle

STATE: dict[str, object] = {"w": torch.arange(1 << 16, dtype=torch.float32)}


def handle_of(pace: Pace) -> OwnHandle:
    return OwnHandle("t", "00000001-0", 1, ShardProgress(pace=pace))


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


def test_who_waits_for_the_snapshot_hurries_the_copy_alone() -> None:
    pace = Pace(share=0.5, copy_until=1e9)
    handle = handle_of(pace)
    handle.advance(Phase.STAGED)
    handle.wait("staged")
    assert pace.copy_until is None
    assert pace.rest_after(0.01, None) == pytest.approx(0.01)


def test_a_save_that_comes_too_soon_is_skipped_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Checkpointer(tmp_path, when_busy="space", on_no_progress="ignore") as ckpt:
        first, governor = ckpt.save(1, STATE).wait(), core_of(ckpt)._saver.governor
        assert governor.spacing_s >= (first.timings.durable_s or 0.0) > 0
        governor.spacing_s = 1e6
        second = ckpt.save(2, STATE)
        with pytest.raises(SkippedError, match=r"global_step2 was skipped on rank 0: it came .* spaced at least 1000000.0 s"):
            second.wait(60)
        assert [one.phase for one in ckpt.status().attempts] == ["committed", "skipped"]
        assert ckpt.status().saves_failed == 0
        assert governor.spacing_s == 1e6  # what was skipped cost nothing
        assert ckpt.save(3, STATE, required=True).wait().phase == "committed"
        governor.spacing_s = 0.0
        assert ckpt.save(4, STATE).wait().phase == "committed"
    assert any("global_step2 was skipped" in record.getMessage() for record in caplog.records)


def test_a_save_counts_from_the_last_one_that_was_kept(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, when_busy="space", on_no_progress="ignore") as ckpt:
        saver = core_of(ckpt)._saver
        saver.governor.spacing_s = 1e6
        failed = core_of(ckpt).refuse(1, StoreError("no disk"), tag="global_step1")
        failed._wait(failed.done, 60)
        assert saver.history.newest_kept() is None
        assert failed.exception() is not None
        assert ckpt.save(2, STATE).wait().phase == "committed"
        assert saver.history.newest_kept() is not None


def test_a_required_save_waits_where_others_are_skipped(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, when_busy="skip", commit_timeout_s=77.0) as ckpt:
        saver = core_of(ckpt)._saver
        assert saver._patience_s(asked(1, None, True)) == 0.0
        assert saver._patience_s(asked(1, None, True, required=True)) == 77.0


def test_a_save_after_a_preemption_signal_is_never_skipped(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, when_busy="space", preempt_signals=signal.SIGUSR1, on_no_progress="ignore") as ckpt:
        ckpt.save(1, STATE).wait()
        core_of(ckpt)._saver.governor.spacing_s = 1e6
        os.kill(os.getpid(), signal.SIGUSR1)
        while not ckpt.preempting:
            pass
        assert ckpt.save(2, STATE).wait().phase == "committed"


def test_spacing_needs_a_limit(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="max_overhead, which is None"):
        Checkpointer(tmp_path, when_busy="space", max_overhead=None)


def test_steps_of_an_optimizer_are_counted(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(3)
    with Checkpointer(tmp_path) as ckpt:
        for _ in range(5):
            optimizer.step()
        assert len(core_of(ckpt)._saver.governor._undisturbed) == 4
