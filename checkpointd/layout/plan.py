"""Checks the plans of all ranks: together, their boxes must cover each element of every tensor exactly once.

A thousand ranks with thousands of tensors each name millions of parts. So each plan becomes a `NumberedPlan`, which consists of
arrays of numbers, and the numbers of all ranks are compared tensor by tensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from checkpointd.layout.boxes import NDIM_MAX, Box, tiling_fault
from checkpointd.layout.indexes import Index, Plan, PlanTensor, TensorEntry

Numbers = NDArray[np.int64]
Named = tuple[str, str, tuple[int, ...]]
"""FQN, dtype and shape."""

_FEW = 16
"""Up to this many boxes are compared faster one by one than as arrays."""
_COUNT_MAX = 1 << 44
"""The most elements of a tensor for which sums over all boxes of all ranks cannot overflow."""


@dataclass(slots=True)
class TensorNumbers:
    """The numbers of tensors. Tensors with the same FQN, dtype and shape have the same number on all ranks."""

    by_number: list[Named] = field(default_factory=list)
    _numbers: dict[Named, int] = field(default_factory=dict)

    def number(self, named: Named) -> int:
        """The number of `named`; a tensor that is not known yet gets a new number."""
        found = self._numbers.setdefault(named, len(self.by_number))
        if found == len(self.by_number):
            self.by_number.append(named)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class NumberedPlan:
    """A plan in the form in which it is compared with others.

    `tensors`: the number in `TensorNumbers` of each part of scope global, in the plan's order. `places`: the offsets and then
    the sizes of each such box, one box after the other. `fault`: an FQN and a reason if the plan is wrong by itself.
    """

    tensors: Numbers
    places: Numbers
    fault: tuple[str, str] | None = None

    @staticmethod
    def of(plan: Plan | Index, names: TensorNumbers) -> NumberedPlan:
        """The numbers of `plan`, or of an index, whose boxes are a plan as well. New tensors are added to `names`."""
        numbers: list[int] = []
        places: list[int] = []
        own: dict[str, list[PlanTensor | TensorEntry]] = defaultdict(list)
        for part in plan.tensors:
            if part.scope == "rank":
                own[part.fqn].append(part)
                continue
            offsets, sizes = part.box.offsets, part.box.sizes
            if not len(offsets) == len(sizes) == len(part.shape):
                return _faulty(part.fqn, tiling_fault(part.shape, [part.box]) or "")
            numbers.append(names.number((part.fqn, part.dtype, part.shape)))
            places += offsets
            places += sizes
        for fqn, parts in own.items():
            if (fault := _own_fault(parts)) is not None:
                return _faulty(fqn, fault)
        try:
            return NumberedPlan(np.array(numbers, np.int64), np.array(places, np.int64))
        except OverflowError:
            return _faulty(*_beyond(plan))


def _faulty(fqn: str, words: str) -> NumberedPlan:
    nothing = np.zeros(0, np.int64)
    return NumberedPlan(nothing, nothing, (fqn, words))


def _own_fault(parts: Sequence[PlanTensor | TensorEntry]) -> str | None:
    first = parts[0]
    for part in parts:
        if (part.dtype, part.shape) != (first.dtype, first.shape):
            return f"is {first.dtype}{list(first.shape)} and {part.dtype}{list(part.shape)}"
    return tiling_fault(first.shape, [part.box for part in parts])


def _beyond(plan: Plan | Index) -> tuple[str, str]:
    """The FQN of the part with a number that no tensor has, and the reason in words."""
    limits = np.iinfo(np.int64)
    for part in plan.tensors:
        if any(not limits.min <= value <= limits.max for value in (*part.box.offsets, *part.box.sizes)):
            return part.fqn, tiling_fault(part.shape, [part.box]) or f"no tensor has the shape {list(part.shape)}"
    raise AssertionError("unreachable")


@dataclass(frozen=True, slots=True)
class Doubled:
    """A tensor with a box that several ranks list. The save is valid only if these ranks stored the same elements.

    `ranks`: all ranks that list such a box.
    """

    fqn: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """The result of comparing the plans of all ranks: `fault` says why they are not one whole state, and `doubled` names the
    tensors whose doubled boxes must be equal.
    """

    fault: str | None = None
    doubled: tuple[Doubled, ...] = ()


def compared(listings: Mapping[int, NumberedPlan], names: TensorNumbers) -> PlanComparison:
    """Compare the plans of all ranks. Each rank must cover its tensors of scope rank; all ranks together must cover the tensors
    of scope global, with one dtype and shape. A fault names the FQN and the ranks.
    """
    for rank, listing in listings.items():
        if listing.fault is not None:
            fqn, words = listing.fault
            return PlanComparison(f"{fqn} (ranks [{rank}]): {words}")
    parts = _by_tensor(listings, names)
    other = _other_tensor(parts, names)
    if other is not None:
        return PlanComparison(other)
    doubled: list[Doubled] = []
    for number, several in parts.items():
        found = _fault(names.by_number[number], several)
        if isinstance(found, str):
            return PlanComparison(found)
        if found is not None:
            doubled.append(found)
    return PlanComparison(doubled=tuple(doubled))


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Boxes of one tensor: row i of `places` is a box of rank `ranks[i]`."""

    ranks: Numbers
    places: Numbers


def _by_tensor(listings: Mapping[int, NumberedPlan], names: TensorNumbers) -> dict[int, list[_Parts]]:
    """All boxes by the number of their tensor. Ranks that list the same tensors in the same order form one table."""
    alike: dict[bytes, list[int]] = defaultdict(list)
    for rank, listing in listings.items():
        alike[listing.tensors.tobytes()].append(rank)
    found: dict[int, list[_Parts]] = defaultdict(list)
    for group in alike.values():
        ranks, table = np.array(group, np.int64), np.stack([listings[rank].places for rank in group])
        at = 0
        for number in listings[group[0]].tensors.tolist():
            width = 2 * len(names.by_number[number][2])
            found[number].append(_Parts(ranks, table[:, at : at + width]))
            at += width
    return found


def rows_by_tensor(listings: Mapping[int, NumberedPlan], names: TensorNumbers) -> dict[int, tuple[Numbers, Numbers]]:
    """The ranks and the places of all boxes of each tensor, by the tensor's number, sorted."""
    found: dict[int, tuple[Numbers, Numbers]] = {}
    for number, several in _by_tensor(listings, names).items():
        ranks = np.concatenate([parts.ranks for parts in several])
        places = np.concatenate([parts.places for parts in several])
        order = np.lexsort((*places.T[::-1], ranks))
        found[number] = ranks[order], places[order]
    return found


def _other_tensor(parts: Mapping[int, Sequence[_Parts]], names: TensorNumbers) -> str | None:
    """The fault that ranks give one FQN different dtypes or shapes; None if they do not."""
    numbers: dict[str, list[int]] = defaultdict(list)
    for number in parts:
        numbers[names.by_number[number][0]].append(number)
    for fqn, several in numbers.items():
        if len(several) > 1:
            firsts = sorted((min(int(some.ranks.min()) for some in parts[number]), number) for number in several)
            (rank, number), (other, another) = firsts[:2]
            (_, dtype, shape), (_, dtype2, shape2) = names.by_number[number], names.by_number[another]
            return f"{fqn} is {dtype}{list(shape)} on rank {rank} and {dtype2}{list(shape2)} on rank {other}"
    return None


def _fault(named: Named, several: Sequence[_Parts]) -> str | Doubled | None:
    fqn, _, shape = named
    places = np.concatenate([parts.places for parts in several])
    if (len(places) > _FEW and _is_grid(shape, places)) or _tiling_fault(shape, places) is None:
        return None
    ranks = np.concatenate([parts.ranks for parts in several])
    once, doubled = _once(len(shape), places, ranks)
    fault = None if doubled and len(once) > _FEW and _is_grid(shape, once) else _tiling_fault(shape, once)
    if fault is not None:
        return f"{fqn} (ranks {sorted(set(ranks.tolist()))}): {fault}"
    return Doubled(fqn, doubled)


def _tiling_fault(shape: tuple[int, ...], places: Numbers) -> str | None:
    ndim = len(shape)
    return tiling_fault(shape, [Box(tuple(row[:ndim]), tuple(row[ndim:])) for row in places.tolist()])


def _once(ndim: int, places: Numbers, ranks: Numbers) -> tuple[Numbers, tuple[int, ...]]:
    """The boxes without duplicates (empty boxes all stay), and the ranks that list a box that another rank lists as well."""
    filled = (places[:, ndim:] > 0).all(axis=1)
    rows = np.flatnonzero(filled)
    if not ndim:  # all of these boxes are the same
        number, count = np.zeros(len(rows), np.int64), np.array([len(rows)])
        first = np.zeros(min(1, len(rows)), np.int64)
    else:
        _, first, number, count = np.unique(places[rows], axis=0, return_index=True, return_inverse=True, return_counts=True)
    again = rows[count[number.reshape(-1)] > 1] if len(rows) else rows
    if not len(again):
        return places, ()
    kept = np.concatenate([rows[np.sort(first)], np.flatnonzero(~filled)])
    return places[kept], tuple(sorted(set(ranks[again].tolist())))


def _is_grid(shape: tuple[int, ...], places: Numbers) -> bool:
    """Whether the boxes are the cells of a grid over a tensor of `shape`, each once. Other tilings give False, too.

    Cuts along one or several dimensions make a grid, and so do the slices of replicas.
    """
    ndim, total = len(shape), math.prod(shape)
    if not 0 < ndim <= NDIM_MAX or not 0 < total <= _COUNT_MAX:
        return False
    whole, offsets, sizes = np.array(shape, np.int64), places[:, :ndim], places[:, ndim:]
    if not ((offsets >= 0) & (sizes >= 0) & (sizes <= whole) & (offsets <= whole - sizes)).all():
        return False
    filled = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[filled], sizes[filled]
    if int(sizes.prod(axis=1).sum()) != total:
        return False
    cells = np.zeros(len(offsets), np.int64)
    for dim in range(ndim):
        starts, first, row = np.unique(offsets[:, dim], return_index=True, return_inverse=True)
        lengths = sizes[first, dim]
        if (lengths[row] != sizes[:, dim]).any() or (starts[:-1] + lengths[:-1] > starts[1:]).any():
            return False
        cells = np.unique(cells * len(starts) + row, return_inverse=True)[1]  # renumbered, so that the numbers stay small
    return len(np.unique(cells)) == len(offsets)


def raw_bytes(index: Index, fqns: Iterable[str] | None = None) -> int:
    """The bytes of tensors before encoding: of the given FQNs, or of all tensors."""
    wanted = None if fqns is None else set(fqns)
    return sum(c.raw for t in index.tensors if wanted is None or t.fqn in wanted for c in t.chunks)
