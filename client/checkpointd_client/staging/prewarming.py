"""Estimates the size of the first snapshot, so that its memory can be prepared in the background."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress

import torch

from checkpointd.pipeline.shard import PAGE
from checkpointd_client import devices
from checkpointd_client.capture.optimizers import tensors_of
from checkpointd_client.capture.state import Captured
from checkpointd_client.sharding.dtensor import is_dtensor, local_of

MOMENTS = 2
"""The tensors per parameter that an optimizer is assumed to make at its first step: Adam makes two."""


def expected(state: Mapping[str, object], captured: Captured) -> tuple[int, torch.device | None]:
    """Estimate the bytes that this rank writes of the captured `state`, with the tensors that its optimizers make at their
    first step. Also name a device that holds some of them, if there is one.

    A low estimate costs the first save some page faults. A high one costs memory until the slot is replaced. The save is right
    in both cases.
    """
    tensors, by_steps = captured.leaves.tensors, captured.leaves.columns.optimizer_only
    device = next(filter(devices.has_streams, dict.fromkeys(tensor.device for tensor in tensors)), None)
    present = sum(tensor.nbytes + PAGE // 64 for tensor in tensors)
    optimizers = [item for item in state.values() if isinstance(item, torch.optim.Optimizer)]
    if not optimizers:
        return present, device
    # If other ranks hold replicas, this rank writes only a part of its parameters and moments: scale the new moments alike.
    written = sum(tensor.nbytes for tensor in compress(tensors, by_steps))
    fresh = sum(_nbytes(p) for optimizer in optimizers for p in _parameters(optimizer) if p not in optimizer.state)
    held = sum(_nbytes(t) for optimizer in optimizers for t in [*_parameters(optimizer), *tensors_of(optimizer)])
    return present + (MOMENTS * fresh * min(written, held) // held if held else 0), device


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def _nbytes(tensor: torch.Tensor) -> int:
    return local_of(tensor).nbytes if is_dtensor(tensor) else tensor.nbytes
