"""User code as it should type-check: run mypy over it, never Python. `make type` does."""

from __future__ import annotations

import signal

import torch

from checkpointd_client import Checkpointer, Loaded, Retention, RngState, SaveHandle, Status


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Status:
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "rng": RngState()}
    rules = Retention(keep_last=3, every_steps=1000, best=1, metric="loss", mode="min")
    with Checkpointer(
        "/mnt/ckpts/run1", compression="planes", preempt_signal=signal.SIGTERM, retention=rules, on_stale="abort"
    ) as ckpt:
        loaded: Loaded | None = ckpt.load(state)
        first = loaded.step + 1 if loaded else 0
        for step in range(first, steps):
            handle: SaveHandle = ckpt.save(step, state, client_state={"epoch": 3}, metrics={"loss": 0.5})
            assert not handle.stale
            seconds: float | None = handle.timings.safe_s
            assert seconds is None or seconds >= 0
            if ckpt.preempted:
                handle.wait(timeout=30.0, until="prepared")
                break
        names: list[str] = [checkpoint.tag for checkpoint in ckpt.list()]
        assert ckpt.latest() in names
        return ckpt.status()


async def wait_for(handle: SaveHandle) -> str:
    return (await handle).phase
