"""A state of one tensor whose elements are all equal, so that a torn or mixed checkpoint shows at once."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpointd_client import Checkpointer


def uniform_weights(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((256, 256), value)}


def load_uniform_weights(root: Path, **options: object) -> tuple[int, float]:
    """Load a checkpoint of `root`; returns its step and the value of all elements."""
    target = uniform_weights(-1.0)
    with Checkpointer(root) as ckpt:
        loaded = ckpt.load(target, **options)
    assert loaded is not None
    assert bool((target["w"] == target["w"][0, 0]).all())
    return loaded.step, float(target["w"][0, 0])
