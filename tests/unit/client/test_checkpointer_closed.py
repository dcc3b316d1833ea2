"""What close() leaves of a Checkpointer: nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from checkpointd.errors import StateError
from checkpointd_client import Checkpointer


def snapshots() -> int:
    """How many snapshots this process still has in memory."""
    return sum("memfd:checkpointd-arena" in line for line in Path("/proc/self/maps").read_text().splitlines())


def saved(ckpt: Checkpointer, model: torch.nn.Module) -> None:
    for handle in [ckpt.save(step, {"model": model}) for step in range(3)]:
        handle.wait()


def saved_and_loaded(ckpt: Checkpointer, model: torch.nn.Module) -> None:
    saved(ckpt, model)
    ckpt.load({"model": model})


def refused(ckpt: Checkpointer, model: torch.nn.Module) -> None:
    with pytest.raises(StateError):
        ckpt.save(1, {"model": model, "x": object()})
    saved(ckpt, model)


@pytest.mark.nightly
@pytest.mark.parametrize("use", [saved, saved_and_loaded, refused])
def test_close_frees_the_snapshots_without_the_cyclic_collector(
    tmp_path: Path, use: Callable[[Checkpointer, torch.nn.Module], None]
) -> None:
    """Trainers switch it off."""
    gc.collect()
    gc.disable()
    try:
        before = snapshots()
        for phase in range(3):
            ckpt = Checkpointer(tmp_path / str(phase))
            use(ckpt, torch.nn.Linear(8, 8))
            ckpt.close()
            del ckpt
            assert snapshots() == before
    finally:
        gc.enable()
