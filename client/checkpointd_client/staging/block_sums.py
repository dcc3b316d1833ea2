"""Checksums of device memory: one wrapping 64-bit sum for each block of 4,096 integers.

`save()` queues the sums on the device, and the stager computes the same over the slot. A sum for each block shows blocks that
changed places, and where a difference lies. The sums wrap in the same way on devices and in numpy, in whatever order the
integers are added.

To add integers of less than 64 bits, torch first makes a 64-bit copy of all of them. So contiguous bytes are added as 64-bit
integers, whatever their dtype, and strided tensors one part after another.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.pipeline.shard import Bytes

LANES = 4096
"""Lanes of one block. A lane is one of the integers that are added up."""
STRIDED_BYTES = 4 << 20
"""Each sum of a strided tensor covers about this many bytes. torch's 64-bit copy of them takes up to 8 times as much."""
UNALIGNED_BYTES = 64 << 20
"""Bytes whose address is no multiple of 8 are copied first, this many at a time. It is a whole number of blocks."""
THREADS = 4
"""The most threads that add up a slot: one thread may be slower than the copy from the device."""
_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LANES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<i2"), 4: np.dtype("<i4"), 8: np.dtype("<i8")}

Sums = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes that are summed together.

    `pieces`: (offset, bytes) of each in the slot, one after the other. `at`: the position of the row's first sum among the sums
    of all rows. `lane`: the bytes of a lane; bytes at the end that fill none have a sum of their own. `block`: the lanes of one
    sum. `dim`: the dimension along which a strided tensor is cut into blocks; None for contiguous bytes.
    """

    pieces: tuple[tuple[int, int], ...]
    at: int = 0
    lane: int = 8
    block: int = LANES
    dim: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(itemgetter(1), self.pieces))

    @property
    def count(self) -> int:
        """How many sums the row has."""
        lanes, rest = divmod(self.nbytes, self.lane)
        return -(-lanes // self.block) + bool(rest)

    def queue(self, data: torch.Tensor, sums: torch.Tensor) -> None:
        """Queue the sums of `data`, on a device, into the row's place in `sums`.

        `data` is contiguous, or a tensor of the shape that `strided` was called with.
        """
        if self.dim is None:
            self._queue_contiguous(data.view(-1).view(torch.uint8), sums)
        else:
            self._queue_strided(data, self.dim, sums)

    def _queue_contiguous(self, data: torch.Tensor, sums: torch.Tensor) -> None:
        at, end = self.at, len(data) // 8 * 8
        # A device reads an integer of 8 bytes only at a multiple of 8. Check both: the storage itself may begin at any address.
        is_aligned = data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0
        for part in data[:end].split(max(end, 1) if is_aligned else UNALIGNED_BYTES):
            lanes = (part if is_aligned else part.clone()).view(torch.int64)
            whole = len(lanes) // LANES
            if whole:
                blocks = lanes[: whole * LANES].view(whole, LANES)
                torch.sum(blocks, 1, dtype=torch.int64, out=sums[at : at + whole])
                at += whole
            if len(lanes) % LANES:
                torch.sum(lanes[whole * LANES :][None], 1, dtype=torch.int64, out=sums[at : at + 1])
                at += 1
        if end < len(data):
            torch.sum(data[end:][None], 1, dtype=torch.int64, out=sums[at : at + 1])

    def _queue_strided(self, data: torch.Tensor, dim: int, sums: torch.Tensor) -> None:
        values = torch.view_as_real(data) if data.itemsize > 8 else data
        integers = values.view(_DTYPES[self.lane])
        everything = list(range(1, integers.dim() + 1))
        rows = self.block * data.shape[dim] // integers.numel()
        for at, part in enumerate(integers.split(rows, dim), self.at):
            torch.sum(part[None], everything, dtype=torch.int64, out=sums[at : at + 1])

    def of_slot(self, buffer: Bytes) -> Sums:
        """The same sums of the bytes that arrived in the slot."""
        sums, block = np.zeros(self.count, dtype=np.int64), self.block
        position = 0
        for offset, nbytes in self.pieces:
            rest = nbytes % self.lane
            lanes = buffer[offset : offset + nbytes - rest].view(_LANES[self.lane])
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
            if rest:
                sums[-1:] += buffer[offset + nbytes - rest : offset + nbytes].sum(dtype=np.int64)
            position += len(lanes)
        return sums

    def bytes_of(self, k: int) -> Iterator[tuple[int, int]]:
        """The (offset, bytes) in the slot that the row's sum number `k` covers."""
        width, end = self.block * self.lane, self.nbytes - self.nbytes % self.lane
        start, left = (k * width, min(width, end - k * width)) if k * width < end else (end, self.nbytes - end)
        for offset, nbytes in self.pieces:
            here = min(nbytes - start, left)
            if here > 0:
                yield offset + start, here
                left -= here
            start = max(start - nbytes, 0)


def strided(offset: int, shape: Sequence[int], item: int) -> Row:
    """The row of a tensor that is not contiguous and has elements of `item` bytes; in the slot it is contiguous, at `offset`.

    A sum covers some indices of the first dimension that has more than one. Within it, elements may change places.
    """
    lane = min(item, 8)
    dim = next(dim for dim, size in enumerate(shape) if size > 1)
    lanes = math.prod(shape) * item // lane
    of_index = lanes // shape[dim]
    return Row(((offset, lanes * lane),), 0, lane, of_index * max(STRIDED_BYTES // (of_index * lane), 1), dim)


def sums_of_slot(rows: Sequence[Row], buffer: Bytes) -> list[Sums]:
    """The sums of each row of the slot, added up by a few threads. Large rows come first, so that all threads end together."""
    left = deque(sorted(rows, key=lambda row: row.nbytes, reverse=True))
    found: dict[Row, Sums] = {}

    def work() -> None:
        with suppress(IndexError):
            while True:
                row = left.popleft()
                found[row] = row.of_slot(buffer)

    count = min(THREADS, len(os.sched_getaffinity(0)), len(rows))
    started: list[threading.Thread] = []
    with suppress(RuntimeError):  # a process that ends starts no thread any more: this one adds up what is left
        for _ in range(count - 1):
            thread = threading.Thread(target=work, name="checkpointd-sums", daemon=True)
            thread.start()
            started.append(thread)
    work()
    for thread in started:
        thread.join()
    return [found[row] for row in rows]


def add_up(device: torch.device) -> bool:
    """Whether `device` adds 64-bit integers as numpy does. Some devices compute with 32 bits instead."""
    values = np.array([[1 << 62] * 3, [-7, (1 << 63) - 1, 9], [1 << 33, 5, -(1 << 40)]], dtype=np.int64)
    found = torch.sum(torch.from_numpy(values).to(device), 1, dtype=torch.int64)
    return bool(np.array_equal(found.cpu().numpy(), values.sum(axis=1, dtype=np.int64)))
