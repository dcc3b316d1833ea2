"""Saves that overlap with training and with each other."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from checkpointd.errors import (
    StoreError,
)
from checkpointd.pipeline import attempt as attempt_module
from checkpointd.pipeline.write.job import PersistJob
from checkpointd_client import Checkpointer
from tests.builders import HeldPersist
from tests.uniform_weights import load_uniform_weights, uniform_weights


def test_a_snapshot_is_not_overwritten_while_it_is_persisted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = HeldPersist(monkeypatch)
    with Checkpointer(tmp_path) as ckpt:
        state = uniform_weights(0.0)
        for step in (1, 2):
            state["w"].fill_(step)
            ckpt.save(step, state)
        state["w"].fill_(-5.0)
        gate.go.set()
        ckpt.wait()
        for step in (3, 4, 5):
            state["w"].fill_(step)
            ckpt.save(step, state)
    for step in range(1, 6):
        assert load_uniform_weights(tmp_path, tag=f"global_step{step}") == (step, float(step))


def test_staging_can_be_awaited_and_a_save_at_every_step_holds_that_steps_state(tmp_path: Path) -> None:
    """How much training is slowed is measured, not asserted: benchmarks/compare.py, columns `lost` and step p99."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sums = {}
    with Checkpointer(tmp_path) as ckpt:
        for step in range(8):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            sums[step] = model.weight.detach().clone()
            handle = ckpt.save(step, {"model": model, "optimizer": optimizer})
            if step % 2:
                assert handle.wait(until="staged").timings.safe_s is not None
    for step in (0, 3, 7):
        with Checkpointer(tmp_path) as ckpt:
            ckpt.load({"model": model}, tag=f"global_step{step}", strict=False)
        assert torch.equal(model.weight, sums[step])


def test_a_failed_save_that_nobody_looks_at_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(job: PersistJob) -> object:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(attempt_module, "persist", broken)
    ckpt = Checkpointer(tmp_path)
    with caplog.at_level(logging.ERROR, "checkpointd"):
        ckpt.save(1, uniform_weights(1.0))
        with pytest.raises(StoreError, match="the disk is gone"):
            ckpt.close()
    assert any("the disk is gone" in record.getMessage() for record in caplog.records)


def test_a_save_may_begin_while_another_is_in_flight(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as ckpt:
        handles = [ckpt.save(step, uniform_weights(float(step))) for step in range(6)]
        assert [handle.wait().phase for handle in handles] == ["committed"] * 6
    assert load_uniform_weights(tmp_path) == (5, 5.0)
    shutil.rmtree(tmp_path)
