"""User code as it should type-check: run mypy over it, never Python. `make type` does."""

from __future__ import annotations

import signal

import torch

from checkpointd_client import Checkpointer, Loaded, Retention, RngState, SaveHandle, Status
from checkpointd_client.errors import MismatchError, PartlyLoadedError, UnreadableError


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> Status:
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "rng": RngState()}
    rules = Retention(keep_last=3, every_steps=1000, best=1, metric="loss", mode="min")
    with Checkpointer("/mnt/ckpts/run0", retention=3) as brief:
        brief.wait(5.0)
    with Checkpointer(
        "/mnt/ckpts/run1", compression="planes", preempt_signals={signal.SIGTERM: 25.0}, retention=rules, on_no_progress="abort"
    ) as ckpt:
        loaded: Loaded | None = ckpt.load(state)
        first = loaded.step + 1 if loaded else 0
        for step in range(first, steps):
            handle: SaveHandle = ckpt.save(step, state, client_state={"epoch": 3}, metrics={"loss": 0.5})
            assert not handle.no_progress
            seconds: float | None = handle.timings.safe_s
            assert seconds is None or seconds >= 0
            if ckpt.preempting and ckpt.preempted(step):
                handle.wait("staged")
                handle.wait("prepared", timeout=30.0)
                handle.wait(timeout=30.0, until="prepared")
                handle.wait(30.0).wait()
                break
        names: list[str] = [checkpoint.tag for checkpoint in ckpt.list()]
        assert ckpt.latest() in names
        return ckpt.status()


def load_or_say_why(ckpt: Checkpointer, state: dict[str, object]) -> Loaded | None:
    try:
        return ckpt.load(state)
    except MismatchError as error:
        differences: tuple[str, ...] = error.mismatches
        raise SystemExit("\n".join(differences)) from error
    except (UnreadableError, PartlyLoadedError) as error:
        can_try_again: bool = error.retryable
        raise SystemExit(error.exit_code if can_try_again else f"{error.code}: {error}") from error


async def wait_for(handle: SaveHandle) -> str:
    return (await handle).phase
