"""A module with a tensor of each kind: one that changes in optimizer steps alone, and one that may change at any time."""

from __future__ import annotations

from pathlib import Path

import torch

from checkpointd_client import Checkpointer


class Net(torch.nn.Module):
    """`weight` changes in `optimizer.step()`, `seen` in the forward pass."""

    seen: torch.Tensor

    def __init__(self, value: float, device: torch.device, side: int = 64) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((side, side), value, device=device))
        self.register_buffer("seen", torch.full((side, side), value, device=device))


def loaded(root: Path, tag: str, device: torch.device, side: int = 64) -> Net:
    """What the checkpoint holds of a Net, in host memory."""
    found = Net(-1.0, device, side)
    with Checkpointer(root) as ckpt:
        ckpt.load({"net": found}, tag=tag, strict=False)
    return found.cpu()
