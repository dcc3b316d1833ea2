"""The orders in which the tests let a device's streams run."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import ModuleType

import torch

SCHEDULES = ("compute ahead", "copies ahead", *(f"chaos {seed}" for seed in range(2)))


def under(sim: ModuleType, schedule: str, main: torch.Stream, patience_ms: int = -1) -> AbstractContextManager[None]:
    """The block runs under `schedule`, if `main` is the stream that trains.

    Other threads that wait for a held stream wait until the block ends, or for `patience_ms`.
    """
    if schedule.startswith("chaos"):
        return sim.chaos(int(schedule.split()[1]))
    order = sim.only if schedule == "compute ahead" else sim.stalled
    return order(main, patience_ms=patience_ms)


def main_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)
