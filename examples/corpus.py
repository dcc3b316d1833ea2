"""Training text that is on every machine, Python's own standard library, and a seeded loader over it."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


def standard_library() -> Tensor:
    """The sources of the standard library's top-level modules, in name order: uint8 `[bytes]`, some 5 MB."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 1_000_000:
        raise FileNotFoundError(f"{folder} holds only {len(text)} bytes of Python sources: nothing to train on")
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())


class Batches:
    """Endless seeded batches of one rank.

    Each pass over the text cuts it into windows of `length + 1` bytes, shuffles them with (seed, pass) and deals
    them out to the ranks like cards, so that ranks never see the same window. The position is two integers: that
    is all a checkpoint has to keep, and what comes next depends on nothing else.
    """

    def __init__(self, text: Tensor, *, batch: int, length: int, rank: int, world: int, seed: int) -> None:
        self.text, self.batch, self.length = text, batch, length
        self.rank, self.world, self.seed = rank, world, seed
        self.passes = self.cursor = 0
        self.order = self._shuffled()
        if len(self.order) < batch:
            raise ValueError(f"{len(text)} bytes are too few for one batch of {batch} x {length} on {world} ranks")

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow them: two int64 tensors `[batch, length]`."""
        if self.cursor + self.batch > len(self.order):
            self.passes, self.cursor = self.passes + 1, 0
            self.order = self._shuffled()
        starts = self.order[self.cursor : self.cursor + self.batch] * self.length
        self.cursor += self.batch
        windows = self.text[starts[:, None] + torch.arange(self.length + 1)].long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"passes": self.passes, "cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.cursor = state["passes"], state["cursor"]
        self.order = self._shuffled()

    def _shuffled(self) -> Tensor:
        # A generator of its own: the order must not depend on what else drew random numbers before.
        generator = torch.Generator().manual_seed(self.seed + self.passes)
        windows = (len(self.text) - 1) // self.length
        return torch.randperm(windows, generator=generator)[self.rank :: self.world]
