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
    """Endless seeded batches, the same ones whatever the number of ranks.

    Each pass over the text cuts it into windows of `length + 1` bytes, shuffles them with (seed, pass) and deals them out
    `batch` at a time. All ranks go through these batches together and each takes its part of every one: part `part` of
    `parts`. So the position, two integers, is the same on all ranks, and a checkpoint of it serves any number of them.
    """

    def __init__(self, text: Tensor, *, batch: int, length: int, part: int, parts: int, seed: int) -> None:
        if batch % parts:
            # The mean of unequal parts' means is not the mean of the batch: training would depend on the number of ranks.
            raise ValueError(f"{parts} ranks cannot share a batch of {batch} windows equally: choose another --batch")
        self.text, self.batch, self.length = text, batch, length
        self.part, self.parts, self.seed = part, parts, seed
        self.passes = self.cursor = 0
        self.order = self._shuffled()
        if len(self.order) < batch:
            raise ValueError(f"{len(text)} bytes are too few for one batch of {batch} x {length}")

    def __next__(self) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow them: two int64 tensors `[batch / parts, length]`."""
        if self.cursor + self.batch > len(self.order):
            self.passes, self.cursor = self.passes + 1, 0
            self.order = self._shuffled()
        ours = self.order[self.cursor : self.cursor + self.batch]
        starts = ours[self.part :: self.parts] * self.length
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
        return torch.randperm(windows, generator=generator)
