"""Detects torn snapshots: save() takes a sample of the tensors that are copied later.

The sample is compared with the slot once everything was copied, and not with the source: so it says what the slot holds,
however the copy and a change of the source interleaved. torch's version counters do not see every change; a sample sees every
change that reaches a sampled byte before its copy does.

Invariants
  TORN-1  A sample never calls a snapshot torn that is not: it reads the bytes that the copy reads, in the copy's order.
  TORN-2  A plan is used only while every tensor has the address, size and strides that it was made for, and the caller holds
      it.
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
"""Bytes that are sampled together: one cache line, which costs hardly more to read than one byte of it."""
EVERY = 32 << 10
"""Of every so many bytes one line is sampled, and the last one of each tensor."""
SMALL = 1 << 10
"""Tensors of up to so many bytes are sampled whole."""
STRIDED = 8
"""Bytes that are sampled in place of a line where elements do not lie in a row."""
_SCATTER = 157
"""Odd, so that another line is sampled from place to place: a change of some columns of a matrix is met as well."""

Places = NDArray[np.int64]


class Proof(Protocol):
    """What shows that a slot holds what the sources held at save(). Other devices bring their own."""

    def torn(self) -> int | None:
        """The position of the first tensor of which the slot holds other bytes than those of save(); None: none is known.

        Asked once, when the slot holds all of the snapshot.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the sources held when it was taken."""

    points: tuple[_Points, ...]
    taken: tuple[Bytes, ...]
    buffer: Bytes

    def torn(self) -> int | None:
        """The first of the sources of which `buffer` holds something else; None where every sampled byte agrees."""
        torn: list[int] = []
        for points, taken in zip(self.points, self.taken, strict=True):
            found = points.in_slot(self.buffer)
            words = "<u8" if points.unit % 8 == 0 else "u1"
            if not np.array_equal(found.view(words), taken.view(words)):
                differ = (found != taken).reshape(-1, points.unit).any(axis=1)
                torn.append(int(points.owner[differ].min()))
        return min(torn, default=None)


class Sampler:
    """Takes samples. The plan of where is kept from one save to the next."""

    def __init__(self) -> None:
        self._where: _Where | None = None
        self._points: tuple[_Points, ...] = ()

    def take(
        self, layout: object, tensors: Sequence[torch.Tensor], starts: Sequence[int], offsets: Sequence[int], buffer: Bytes
    ) -> Sample:
        """A sample of `tensors`, on the host and not empty. Each will lie in `buffer` from its offset on, in a row.

        `starts`: addresses of those whose elements lie in a row, 0 where that is not known. For one `layout`, dtype and shape
        of a tensor follow from its offset.
        """
        # Flat lists, compared as such: this runs inside every save(), for every tensor.
        starts = list(starts)
        strides: dict[int, tuple[int, ...]] = {}
        for i, start in enumerate(starts):
            if not start:
                starts[i] = tensors[i].data_ptr()
                if not tensors[i].is_contiguous():
                    strides[i] = tensors[i].stride()
        where = _Where(layout, starts, list(offsets), strides)
        if self._where != where:
            self._where, self._points = where, _planned(tensors, where)
        return Sample(self._points, tuple(points.in_memory() for points in self._points), buffer)


@dataclass(frozen=True, slots=True)
class _Where:
    """Where tensors lie, and where they will. `strides`: of those that are not contiguous, by position."""

    layout: object
    starts: list[int]
    offsets: list[int]
    strides: dict[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Points:
    """Places of `unit` bytes each. `windows`: addresses to count from, each with the places there, in units. `slot`: where the
    same bytes will lie in the slot, in units. `owner`: the position of the tensor that each belongs to.
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
    """All memory from `base` on as `count` items; nothing of it is looked at but what is taken."""
    return array_at(base, (count,), (unit,), unit)


# --- where to look ----------------------------------------------------------------------------------------------------


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
    """Lines of what lies in a row. Tensors need not begin at a multiple of LINE: those with one remainder share a window."""
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
    """For counts 2, 0, 3: whose each is, 0 0 2 2 2, and which of its own, 0 1 0 1 2."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    first = np.cumsum(counts) - counts
    return owner, np.arange(len(owner), dtype=np.int64) - first[owner]


def _scattered(i: int, tensor: torch.Tensor, where: _Where) -> tuple[Places, Places, Places]:
    """The same of one whose elements lie anyhow, by single bytes: addresses, places in the slot, and whose."""
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
