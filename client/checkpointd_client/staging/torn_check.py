"""Detects torn snapshots: save() takes a sample of the tensors that are copied later.

When everything is copied, the sample is compared with the slot, not with the sources. So the result does not depend on how the
copy and a change of a source interleaved. torch's version counters miss some changes. A sample catches every change that
reaches a sampled byte before the copy does.

Invariants
  TORN-1  A sample never calls a good snapshot torn: it reads the bytes that the copy reads, in the copy's order.
  TORN-2  A plan is used only while every tensor has the address, size and strides that the plan was made for. The caller keeps
      the tensors alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from checkpointd.pipeline.shard import Bytes
from checkpointd_client.capture.aliasing import array_at

LINE = 64
"""Bytes that are sampled together: one cache line, since reading all of it costs hardly more than one byte."""
EVERY = 32 << 10
"""One line is sampled in each run of this many bytes, and the last line of each tensor."""
SMALL = 1 << 10
"""Tensors of up to this many bytes are sampled whole."""
STRIDED = 8
"""Bytes that are sampled instead of a line if the tensor is not contiguous."""
_SCATTER = 157
"""The sampled line moves by this many lines from run to run. It is odd, so a change of some columns of a matrix shows, too."""

Places = NDArray[np.int64]


class Proof(Protocol):
    """A check that a slot holds the bytes that sources in host memory had at save(). Devices have sums (`block_sums.py`)."""

    def torn(self) -> int | None:
        """The position of the first tensor whose bytes in the slot differ from those at save(); None if no difference is known.

        Called once, when the slot holds all of the snapshot.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Sampled bytes of the sources at save(), and the slot `buffer` to compare them with."""

    points: tuple[_Points, ...]
    taken: tuple[Bytes, ...]
    buffer: Bytes

    def torn(self) -> int | None:
        """The position of the first source whose sampled bytes differ from `buffer`; None if all agree."""
        torn: list[int] = []
        for points, taken in zip(self.points, self.taken, strict=True):
            found = points.in_slot(self.buffer)
            words = "<u8" if points.unit % 8 == 0 else "u1"
            if not np.array_equal(found.view(words), taken.view(words)):
                differ = (found != taken).reshape(-1, points.unit).any(axis=1)
                torn.append(int(points.owner[differ].min()))
        return min(torn, default=None)


class Sampler:
    """Takes samples. It keeps the plan of the sampled places from one save to the next."""

    def __init__(self) -> None:
        self._where: _Where | None = None
        self._points: tuple[_Points, ...] = ()

    def take(
        self, layout: object, tensors: Sequence[torch.Tensor], starts: Sequence[int], offsets: Sequence[int], buffer: Bytes
    ) -> Sample:
        """Sample `tensors`, which lie on the host and are not empty. The copy puts each at its offset in `buffer`, contiguous.

        `starts`: the addresses of contiguous tensors, or 0 where that is not known. For one `layout`, the dtype and shape of a
        tensor follow from its offset.
        """
        # This runs inside every save(), so it compares flat lists, and looks only at the tensors of which too little is known.
        starts = list(starts)
        strides: dict[int, tuple[int, ...]] = {}
        for i in [i for i, start in enumerate(starts) if not start] if 0 in starts else ():
            starts[i] = tensors[i].data_ptr()
            if not tensors[i].is_contiguous():
                strides[i] = tensors[i].stride()
        where = _Where(layout, starts, list(offsets), strides)
        if self._where != where:
            self._where, self._points = where, _planned(tensors, where)
        return Sample(self._points, tuple(points.in_memory() for points in self._points), buffer)


@dataclass(frozen=True, slots=True)
class _Where:
    """The addresses of tensors and their offsets in the slot. `strides`: by position, for tensors that are not contiguous."""

    layout: object
    starts: list[int]
    offsets: list[int]
    strides: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Points:
    """Sampled places of `unit` bytes each. `windows`: base addresses, each with its places, counted in units. `slot`: the same
    places in the slot, in units. `owner`: for each place, the position of its tensor.
    """

    unit: int
    windows: tuple[tuple[int, Places], ...]
    slot: Places
    owner: Places

    def in_memory(self) -> Bytes:
        found = [np.take(_window(base, int(places.max()) + 1, self.unit), places) for base, places in self.windows]
        return (found[0] if len(found) == 1 else np.concatenate(found)).view(np.uint8)

    def in_slot(self, buffer: Bytes) -> Bytes:
        whole = buffer[: len(buffer) // self.unit * self.unit]
        return np.take(whole.view(f"V{self.unit}"), self.slot).view(np.uint8)


def _window(base: int, count: int, unit: int) -> NDArray[Any]:
    """The memory from `base` on as `count` items. Other memory may lie in between: read only items inside a tensor."""
    return array_at(base, (count,), (unit,), unit)


# --- the plan ---------------------------------------------------------------------------------------------------------


def _planned(tensors: Sequence[torch.Tensor], where: _Where) -> tuple[_Points, ...]:
    starts, offsets = np.array(where.starts, np.int64), np.array(where.offsets, np.int64)
    nbytes = np.array([0 if i in where.strides else tensor.nbytes for i, tensor in enumerate(tensors)], np.int64)
    lines = _lines(starts, nbytes, offsets)
    owner, k = _counted(nbytes % LINE)
    at = (nbytes // LINE * LINE)[owner] + k
    rest = [(starts[owner] + at, offsets[owner] + at, owner)]
    rest += [_scattered(i, tensors[i], where) for i in where.strides]
    addresses, slot, owner = (np.concatenate(parts) for parts in zip(*rest, strict=True))
    if not len(addresses):
        return lines
    base = int(addresses.min())
    return (*lines, _Points(1, ((base, addresses - base),), slot, owner))


def _lines(starts: Places, nbytes: Places, offsets: Places) -> tuple[_Points, ...]:
    """Lines of the contiguous tensors. Tensors whose addresses have the same remainder modulo LINE share a window."""
    whole, every = nbytes // LINE, EVERY // LINE
    small = nbytes <= SMALL
    owner, k = _counted(np.where(small, whole, -(-whole // every) + 1))
    if not len(owner):
        return ()
    scattered = np.minimum(k * every + (k + owner) * _SCATTER % every, whole[owner] - 1)
    at = np.where(small[owner], k, scattered)
    rest = (starts % LINE)[owner]
    order = np.argsort(rest, kind="stable")
    owner, at, rest = owner[order], at[order], rest[order]
    cuts = np.flatnonzero(np.diff(rest)) + 1
    windows = tuple(
        (base := int(addresses.min()), (addresses - base) // LINE) for addresses in np.split(starts[owner] + at * LINE, cuts)
    )
    return (_Points(LINE, windows, offsets[owner] // LINE + at, owner),)


def _counted(counts: Places) -> tuple[Places, Places]:
    """For counts 2, 0, 3: the owner of each item, 0 0 2 2 2, and its number within the owner, 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner), dtype=np.int64) - first[owner]


def _scattered(i: int, tensor: torch.Tensor, where: _Where) -> tuple[Places, Places, Places]:
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
        (index * step for index, step in zip(indices, where.strides[i], strict=True)), np.zeros(len(elements), np.int64)
    )
    part = np.arange(item, dtype=np.int64)
    addresses = (where.starts[i] + (there * item)[:, None] + part).reshape(-1)
    return addresses, (where.offsets[i] + (elements * item)[:, None] + part).reshape(-1), np.full(len(addresses), i, np.int64)
