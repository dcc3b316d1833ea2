"""Checksums of device memory: one wrapping 64-bit sum for each block of 4,096 lanes.

`save()` queues the sums on the device, and the stager computes the same over the slot. A lane is an integer of 1, 2, 4 or 8
bytes. A sum for each block shows blocks that changed places, and where a difference lies. The sums wrap in the same way on
devices and in numpy, in whatever order the lanes are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.pipeline.shard import Bytes

LANES = 4096
"""Lanes of one block."""
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LANES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}

Sums = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes that are summed together.

    `pieces`: (offset, bytes) of each in the slot, one after the other. `lane`: the bytes of a lane, which divide those of each
    piece. `at`: the position of the row's first sum among the sums of all rows. `in_blocks`: False for a single sum.
    """

    pieces: tuple[tuple[int, int], ...]
    lane: int
    at: int
    in_blocks: bool = True

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.pieces)

    @property
    def count(self) -> int:
        """How many sums the row has."""
        return -(-self.nbytes // (LANES * self.lane)) if self.in_blocks else 1

    def queue(self, data: torch.Tensor, sums: torch.Tensor) -> None:
        """Queue the sums of `data`, on a device, into the row's place in `sums`.

        `data` is contiguous if the row has blocks; otherwise it may have any strides.
        """
        if not self.in_blocks:
            values = torch.view_as_real(data) if data.itemsize > 8 else data
            integers = values.view(_DTYPES[values.itemsize])
            everything = list(range(1, integers.dim() + 1))
            torch.sum(integers[None], everything, dtype=torch.int64, out=sums[self.at : self.at + 1])
            return
        lanes = data.view(-1).view(torch.uint8).view(_DTYPES[self.lane])
        whole, end = lanes.numel() // LANES, self.at + self.count
        if whole:
            blocks = lanes[: whole * LANES].view(whole, LANES)
            torch.sum(blocks, 1, dtype=torch.int64, out=sums[self.at : self.at + whole])
        if self.at + whole < end:
            torch.sum(lanes[whole * LANES :][None], 1, dtype=torch.int64, out=sums[self.at + whole : end])

    def of_slot(self, buffer: Bytes) -> Sums:
        """The same sums of the bytes that arrived in the slot."""
        sums = np.zeros(self.count, dtype=np.int64)
        block = LANES if self.in_blocks else max(self.nbytes, 1)
        position = 0
        for offset, nbytes in self.pieces:
            lanes = buffer[offset : offset + nbytes].view(_LANES[self.lane])
            head = min(-position % block, len(lanes))
            blocks = (len(lanes) - head) // block
            middle = lanes[head : head + blocks * block].reshape(blocks, block)
            tail = lanes[head + blocks * block :]
            first = -(-position // block)
            # Slices of one sum each: numpy warns when a single number wraps, and not when an array does.
            if head:
                sums[position // block : position // block + 1] += lanes[:head].sum(dtype=np.int64)
            sums[first : first + blocks] += middle.sum(axis=1, dtype=np.int64)
            if len(tail):
                sums[first + blocks : first + blocks + 1] += tail.sum(dtype=np.int64)
            position += len(lanes)
        return sums

    def bytes_of(self, k: int) -> Iterator[tuple[int, int]]:
        """The (offset, bytes) in the slot that the row's sum number `k` covers."""
        start, left = (k * LANES * self.lane, LANES * self.lane) if self.in_blocks else (0, self.nbytes)
        for offset, nbytes in self.pieces:
            here = min(nbytes - start, left)
            if here > 0:
                yield offset + start, here
                left -= here
            start = max(start - nbytes, 0)


def lane_of(*multiples: int) -> int:
    """The bytes of the widest lane that divides all of `multiples`."""
    return next(lane for lane in (8, 4, 2, 1) if not any(n % lane for n in multiples))


def add_up(device: torch.device) -> bool:
    """Whether `device` adds 64-bit integers as numpy does. Some devices compute with 32 bits instead."""
    values = np.array([[1 << 62] * 3, [-7, (1 << 63) - 1, 9], [1 << 33, 5, -(1 << 40)]], dtype=np.int64)
    found = torch.sum(torch.from_numpy(values).to(device), 1, dtype=torch.int64)
    return bool(np.array_equal(found.cpu().numpy(), values.sum(axis=1, dtype=np.int64)))
