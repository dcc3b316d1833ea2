"""Where each tensor of a state lies in a slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from checkpointd.layout.boxes import whole
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.pipeline.pages import page_up
from checkpointd.pipeline.shard import ShardTensor, aligned
from checkpointd_client.capture.state import Captured

Part = tuple[int, int, torch.dtype, tuple[int, ...]]
"""Offset, bytes, dtype and shape of a tensor in a slot."""


@dataclass(frozen=True, eq=False)
class SlotLayout:
    """The place of each tensor of a state in a slot; used again while the state keeps its `Captured.arrangement`."""

    tensors: tuple[ShardTensor, ...]
    parts: list[Part]
    nbytes: int


def plan_slot(captured: Captured) -> SlotLayout:
    """Lay the tensors out one after the other, at multiples of 64 bytes; `nbytes` is a whole number of pages."""
    tensors: list[ShardTensor] = []
    parts: list[Part] = []
    offset = 0
    columns = captured.leaves.columns
    for fqn, dtype, part, tensor in zip(columns.fqns, columns.dtypes, columns.parts, captured.leaves.tensors, strict=True):
        item, shape = ITEM_BYTES[dtype], tuple(tensor.shape)
        nbytes = tensor.numel() * item
        if part is None:
            tensors.append(ShardTensor(fqn, dtype, shape, whole(shape), "rank", offset, nbytes, item))
        else:
            tensors.append(ShardTensor(fqn, dtype, part.shape, part.box, "global", offset, nbytes, item))
        parts.append((offset, nbytes, tensor.dtype, shape))
        offset += aligned(nbytes)
    return SlotLayout(tuple(tensors), parts, page_up(max(offset, 1)))
