"""Places in the memory of tensors, and where they lie in the slot: many of them are read by address in one call of numpy.

Invariants
  PLACES-1  Places are used only while every tensor has the address, size and strides for which they were planned. The caller
      holds the tensors, and no other thread gives one of them other memory meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.pipeline.shard import Bytes
from checkpointd_client.capture.aliasing import array_at

LINE = 64
"""Bytes that are read together: one cache line, since reading all of it costs hardly more than one byte."""
EVERY = 32 << 10
"""One line is sampled in each run of this many bytes, and the last line of each tensor."""
SMALL = 1 << 10
"""Tensors of up to this many bytes are sampled whole."""
STRIDED = 8
"""Bytes that are sampled instead of a line if the tensor is not contiguous."""
_SCATTER = 157
"""The sampled line moves by this many lines from run to run. It is odd, so a change of some columns of a matrix shows, too."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Points:
    """Places of `unit` bytes each. `windows`: base addresses, each with its places, counted in units. `slot`: the same
    places in the slot, in units. `owner`: for each place, the position of its tensor.
    """

    unit: int
    windows: tuple[tuple[int, Numbers], ...]
    slot: Numbers
    owner: Numbers

    def in_memory(self) -> Bytes:
        found = [np.take(_window(base, int(places.max()) + 1, self.unit), places) for base, places in self.windows]
        return (found[0] if len(found) == 1 else np.concatenate(found)).view(np.uint8)

    def copy(self, buffer: Bytes) -> None:
        """Copy the bytes at these places into the slot `buffer`."""
        there = buffer[: len(buffer) // self.unit * self.unit].view(f"V{self.unit}")
        if len(self.windows) == 1 and self.is_run:
            ((base, places),) = self.windows
            out = there[self.slot[0] : self.slot[-1] + 1]
            # All places lie inside. In the default mode numpy would check each, and go through a buffer, which is slow.
            np.take(_window(base, int(places.max()) + 1, self.unit), places, out=out, mode="clip")
        else:
            there[self.slot] = self.in_memory().view(there.dtype)

    @property
    def is_run(self) -> bool:
        """Whether the places lie one behind the other in the slot, in their order."""
        return bool((np.diff(self.slot) == 1).all())

    def in_slot(self, buffer: Bytes) -> Bytes:
        whole = buffer[: len(buffer) // self.unit * self.unit]
        return np.take(whole.view(f"V{self.unit}"), self.slot).view(np.uint8)


def _window(base: int, count: int, unit: int) -> NDArray[Any]:
    """The memory from `base` on as `count` items. Other memory may lie in between: read only items inside a tensor."""
    return array_at(base, (count,), (unit,), unit)


@dataclass(frozen=True, slots=True)
class Where:
    """The addresses of tensors and their offsets in the slot. `strided`: by position, sizes and strides of tensors that are not
    contiguous.
    """

    addresses: list[int]
    nbytes: list[int]
    offsets: Sequence[int]
    strided: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]


T = TypeVar("T")
Key = tuple[object, object]


def _are(one: Key | None, two: Key | None) -> bool:
    return one is not None and two is not None and one[0] is two[0] and one[1] is two[1]


class Remembered(Generic[T]):
    """What `make` makes of tensors, remembered from one save to the next while they lie where they lay."""

    def __init__(self, make: Callable[[Sequence[torch.Tensor], Where], T]) -> None:
        self._make = make
        self._key: Key | None = None
        self._where: Where | None = None
        self._made: T | None = None

    def of(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], key: Key | None = None) -> T:
        """That of `tensors`, which lie on the host and are not empty. Each goes to its offset in the slot, contiguous.

        `key`: calls with the same two objects have the same `offsets`, and tensors that lie at the same addresses in the same
        way. So nothing needs to be compared.
        """
        known = self._made
        if known is not None and _are(key, self._key):
            return known
        strided = {i: (tuple(t.shape), t.stride()) for i, t in enumerate(tensors) if not t.is_contiguous()}
        where = Where([t.data_ptr() for t in tensors], [t.nbytes for t in tensors], offsets, strided)
        if known is None or where != self._where:
            known = self._made = self._make(tensors, where)
            self._where = where
        self._key = key
        return known


def sampled(tensors: Sequence[torch.Tensor], where: Where) -> tuple[Points, ...]:
    """The places that are sampled: a few of each tensor, all of a small one."""
    return _planned(tensors, where, SMALL)


def entire(tensors: Sequence[torch.Tensor], where: Where) -> tuple[Points, ...]:
    """All places of contiguous tensors."""
    return _planned(tensors, where, max(where.nbytes))


# --- the plan ---------------------------------------------------------------------------------------------------------


def _planned(tensors: Sequence[torch.Tensor], where: Where, small: int) -> tuple[Points, ...]:
    starts, offsets = np.array(where.addresses, np.int64), np.array(where.offsets, np.int64)
    nbytes = np.array(where.nbytes, np.int64)
    nbytes[list(where.strided)] = 0
    lines = _lines(starts, nbytes, offsets, small)
    owner, k = _counted(nbytes % LINE)
    at = (nbytes // LINE * LINE)[owner] + k
    rest = [(starts[owner] + at, offsets[owner] + at, owner)]
    rest += [_scattered(i, tensors[i], where) for i in where.strided]
    addresses, slot, owner = (np.concatenate(parts) for parts in zip(*rest, strict=True))
    if not len(addresses):
        return lines
    base = int(addresses.min())
    return (*lines, Points(1, ((base, addresses - base),), slot, owner))


def _lines(starts: Numbers, nbytes: Numbers, offsets: Numbers, small: int) -> tuple[Points, ...]:
    """Lines of the contiguous tensors. Tensors whose addresses have the same remainder modulo LINE share a window."""
    whole, every = nbytes // LINE, EVERY // LINE
    is_whole = nbytes <= small
    owner, k = _counted(np.where(is_whole, whole, -(-whole // every) + 1))
    if not len(owner):
        return ()
    scattered = np.minimum(k * every + (k + owner) * _SCATTER % every, whole[owner] - 1)
    at = np.where(is_whole[owner], k, scattered)
    rest = (starts % LINE)[owner]
    order = np.argsort(rest, kind="stable")
    owner, at, rest = owner[order], at[order], rest[order]
    cuts = np.flatnonzero(np.diff(rest)) + 1
    windows = tuple(
        (base := int(addresses.min()), (addresses - base) // LINE) for addresses in np.split(starts[owner] + at * LINE, cuts)
    )
    return (Points(LINE, windows, offsets[owner] // LINE + at, owner),)


def _counted(counts: Numbers) -> tuple[Numbers, Numbers]:
    """For counts 2, 0, 3: the owner of each item, 0 0 2 2 2, and its number within the owner, 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner), dtype=np.int64) - first[owner]


def _scattered(i: int, tensor: torch.Tensor, where: Where) -> tuple[Numbers, Numbers, Numbers]:
    """Single bytes of a tensor that is not contiguous: their addresses, their places in the slot, and their owner."""
    item, count = tensor.itemsize, tensor.numel()
    if tensor.nbytes <= SMALL:
        elements = np.arange(count, dtype=np.int64)
    else:
        row = np.arange(max(STRIDED // item, 1), dtype=np.int64)
        elements = np.minimum(np.arange(0, count, EVERY // item, dtype=np.int64)[:, None] + row, count - 1).reshape(-1)
        elements = np.append(elements, count - 1)
    indices = np.unravel_index(elements, tensor.shape)
    there = sum(
        (index * step for index, step in zip(indices, where.strided[i][1], strict=True)), np.zeros(len(elements), np.int64)
    )
    part = np.arange(item, dtype=np.int64)
    addresses = (where.addresses[i] + (there * item)[:, None] + part).reshape(-1)
    return addresses, (where.offsets[i] + (elements * item)[:, None] + part).reshape(-1), np.full(len(addresses), i, np.int64)
