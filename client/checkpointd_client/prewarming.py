"""How large the first snapshot will probably be, so that its memory can be made ready in the background."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from checkpointd.errors import StateError
from checkpointd.pipeline.shard import PAGE
from checkpointd_client.state import capture

MOMENTS = 2
"""An optimizer that has not stepped yet is taken to keep this many tensors per parameter, as Adam does."""


def expected_bytes(state: Mapping[str, object]) -> int:
    """Bytes of the tensors that `state` holds, and of those that its optimizers will make at their first step; 0 where unknown.

    An estimate that is too small costs the first save some page faults; one that is too large, memory until the slot is
    replaced. Either way the save is right.
    """
    try:
        captured = capture(state, None, exclude_frozen_parameters=False)
    except StateError:
        return 0  # save() will say so, with the FQN
    present = sum(leaf.tensor.nbytes + PAGE // 64 for leaf in captured.leaves)
    return present + sum(_moments(item) for item in state.values() if isinstance(item, torch.optim.Optimizer))


def _moments(optimizer: torch.optim.Optimizer) -> int:
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return MOMENTS * sum(p.nbytes for p in parameters if p not in optimizer.state)
