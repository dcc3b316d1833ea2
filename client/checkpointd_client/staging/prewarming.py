"""Estimates the size of the first snapshot, so that its memory can be prepared in the background."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkpointd.errors import StateError
from checkpointd.pipeline.shard import PAGE
from checkpointd_client.capture.state import capture
from checkpointd_client.sharding.dtensor import is_dtensor, local_of

MOMENTS = 2
"""An optimizer that has not stepped yet is taken to keep this many tensors per parameter, as Adam does."""


def expected_bytes(state: Mapping[str, object]) -> int:
    """Bytes of the tensors that this rank writes of `state`, and of those that its optimizers will make at their first step; 0
    where unknown.

    An estimate that is too small costs the first save some page faults; one that is too large, memory until the slot is
    replaced. Either way the save is right.
    """
    try:
        captured = capture(state, None, exclude_frozen_parameters=False)
    except StateError:
        return 0  # save() will say so, with the FQN
    present = sum(leaf.tensor.nbytes + PAGE // 64 for leaf in captured.leaves)
    optimizers = [item for item in state.values() if isinstance(item, torch.optim.Optimizer)]
    if not optimizers:
        return present
    stepped = [p for optimizer in optimizers for p in _parameters(optimizer)]
    # What ranks hold together is written in parts: the moments as much as the parameters, which are lazy as these will be.
    written = sum(leaf.tensor.nbytes for leaf in captured.leaves if leaf.optimizer_only)
    fresh = sum(_nbytes(p) for optimizer in optimizers for p in _parameters(optimizer) if p not in optimizer.state)
    held = sum(map(_nbytes, stepped)) + sum(_nbytes(t) for optimizer in optimizers for t in _state_tensors(optimizer))
    return present + (MOMENTS * fresh * min(written, held) // held if held else 0)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    return local_of(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes
