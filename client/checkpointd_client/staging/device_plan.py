"""How a save copies the tensors of one device: which are gathered, which are cloned, and which sums prove the copies.

The plan follows from the arrangement of the state and from the layout of the slot, so it is made once and used by every save.
The rest of the work at save() is a few calls, each for many tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import itemgetter
from typing import Any

import torch

from checkpointd.pipeline.shard import aligned
from checkpointd_client import devices
from checkpointd_client.capture.dtypes import carrier_of
from checkpointd_client.capture.leaves import Leaves, outer_of
from checkpointd_client.staging.block_sums import Row, strided
from checkpointd_client.staging.slot_layout import SlotLayout

GATHERED_BYTES = 256 << 10
"""Tensors of up to this size are gathered."""
SCRATCH_BYTES = 128 << 20
"""The most memory of a device that is kept for gathering."""
ALONE_BYTES = 16 << 20
"""Sums of a tensor of this size take about as long as their launch, so a larger tensor is summed by a launch of its own."""
ALIGNMENT = 64
"""Tensors that are summed together must be multiples of this many bytes, so that no gap lies between them."""


@dataclass(frozen=True, slots=True, eq=False)
class Gathering:
    """Tensors of one dtype that one call copies into the scratch memory.

    `sources`: takes them out of all tensors. `carrier`: the dtype of integers in which they are copied; None: their own dtype.
    """

    sources: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    carrier: torch.dtype | None
    targets: list[torch.Tensor]

    def queue(self, tensors: Sequence[torch.Tensor]) -> None:
        sources = self.sources(tensors)
        if self.carrier is not None:
            sources = tuple(map(torch.Tensor.view, sources, repeat(self.carrier)))
        torch._foreach_copy_(self.targets, list(sources))


@dataclass(frozen=True, slots=True)
class Run:
    """Gathered tensors that lie one after the other in the slot, and so in the scratch memory."""

    slot: int
    scratch: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Gatherings that fill `memory`, a part of the scratch memory. `row`: its sums; None without checksums."""

    gatherings: tuple[Gathering, ...]
    memory: torch.Tensor
    row: Row | None

    def gather(self, tensors: Sequence[torch.Tensor]) -> None:
        """Queue the copies into `memory` on the current stream."""
        for gathering in self.gatherings:
            gathering.queue(tensors)

    def add_up(self, sums: torch.Tensor | None) -> None:
        """Queue the sums of `memory`."""
        if self.row is not None and sums is not None:
            self.row.queue(self.memory, sums)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """The plan for the tensors of one device. Positions are those of the leaves of the state."""

    device: torch.device
    scratch: torch.Tensor | None
    """Memory of the device (uint8) into which tensors are gathered; None if none are."""
    gathered: Batch | None
    """The small tensors: they are copied from the scratch memory."""
    runs: tuple[Run, ...]
    moving: tuple[int, ...]
    """Of the other tensors, those that may change outside optimizer steps. They are cloned first."""
    stable: tuple[int, ...]
    """Of the other tensors, those that change in optimizer steps alone. They are copied directly."""
    batches: tuple[Batch, ...]
    """Stable tensors that are gathered only to be summed."""
    alone: tuple[tuple[int, Row], ...]
    """Rows of single tensors, each with the place of its tensor in `direct`."""
    sums: int
    """How many sums there are."""
    counted: tuple[int, ...]
    """Tensors whose changes torch counts, and that only optimizer steps may change."""
    have_outer: bool
    """Whether some of these are parts of composite tensors, with which torch counts changes as well."""
    is_whole: bool
    """Whether the device had the memory that the plan needs."""

    @property
    def direct(self) -> tuple[int, ...]:
        """The tensors that are not gathered."""
        return self.moving + self.stable

    @property
    def rows(self) -> list[Row]:
        batches = (self.gathered, *self.batches)
        return [batch.row for batch in batches if batch and batch.row] + [row for _, row in self.alone]


def plan_device(device: torch.device, leaves: Leaves, layout: SlotLayout, *, still: bool, checksums: bool | None) -> DevicePlan:
    """The plan for the leaves on `device`. With `still`, no tensor changes before the snapshot is whole."""
    for scratch_bytes in (SCRATCH_BYTES, 0):
        try:
            return _Planner(device, leaves, layout, still, checksums).planned(scratch_bytes)
        except RuntimeError as error:
            if not scratch_bytes or not devices.is_out_of_memory(error):
                raise
    raise AssertionError("unreachable")


class _Planner:
    def __init__(self, device: torch.device, leaves: Leaves, layout: SlotLayout, still: bool, checksums: bool | None) -> None:
        self._device, self._leaves, self._parts, self._checksums = device, tuple(leaves), layout.parts, checksums
        self._tensors = leaves.tensors
        self._here = [i for i, leaf in enumerate(self._leaves) if leaf.tensor.numel() and leaf.tensor.device == device]
        self._stable = {i for i in self._here if still or self._leaves[i].optimizer_only}
        self._still = still
        self._sums = 0

    def planned(self, scratch_bytes: int) -> DevicePlan:
        small = self._small(scratch_bytes)
        moving = [i for i in self._here if i not in small and i not in self._stable]
        stable = [i for i in self._here if i not in small and i in self._stable]
        direct = {i: k for k, i in enumerate([*moving, *stable])}
        together, alone = self._to_sum(direct, scratch_bytes)
        runs, places = self._runs(small)
        nbytes = max([sum(run.nbytes for run in runs), *(sum(map(self._nbytes, some)) for some in together)])
        # Zeros, so that the gaps between tensors hold nothing of the device's earlier memory.
        scratch = torch.zeros(nbytes, dtype=torch.uint8, device=self._device) if nbytes else None
        pieces = tuple((run.slot, run.nbytes) for run in runs)
        counted = self._counted()
        return DevicePlan(
            self._device,
            scratch,
            self._batch(scratch, places, pieces) if scratch is not None and runs else None,
            runs,
            tuple(moving),
            tuple(stable),
            tuple(self._dense(some, scratch) for some in together if scratch is not None),
            tuple((direct[i], self._row_of(i)) for i in alone),
            self._sums,
            counted,
            any(outer_of(self._tensors[i]) is not None for i in counted),
            is_whole=bool(scratch_bytes),
        )

    def _counted(self) -> tuple[int, ...]:
        here = () if self._still else self._here
        return tuple(i for i in here if self._leaves[i].optimizer_only and not self._leaves[i].tensor.is_inference())

    def _nbytes(self, i: int) -> int:
        return self._parts[i][1]

    def _small(self, scratch_bytes: int) -> set[int]:
        """The tensors to gather. Those that would have to be cloned come first, and small ones before large ones."""
        fits = [i for i in self._here if self._nbytes(i) <= GATHERED_BYTES and self._leaves[i].tensor.is_contiguous()]
        small: set[int] = set()
        for i in sorted(fits, key=lambda i: (i in self._stable, self._nbytes(i))):
            scratch_bytes -= aligned(self._nbytes(i))
            if scratch_bytes < 0:
                break
            small.add(i)
        return small

    def _to_sum(self, direct: Iterable[int], scratch_bytes: int) -> tuple[list[list[int]], list[int]]:
        """The direct tensors that are summed together, batch by batch, and those that are summed alone."""
        together: list[list[int]] = []
        alone: list[int] = []
        left = 0
        for i in sorted(direct, key=lambda i: str(self._leaves[i].tensor.dtype)) if self._checksums else ():
            nbytes, tensor = self._nbytes(i), self._leaves[i].tensor
            fits = nbytes < min(ALONE_BYTES, scratch_bytes) and nbytes % ALIGNMENT == 0 and tensor.is_contiguous()
            if not fits or i not in self._stable:
                alone.append(i)
                continue
            if nbytes > left:
                together.append([])
                left = scratch_bytes
            together[-1].append(i)
            left -= nbytes
        return together, alone

    def _runs(self, small: set[int]) -> tuple[tuple[Run, ...], dict[int, int]]:
        """The runs of the small tensors, and the place of each tensor in the scratch memory."""
        runs: list[Run] = []
        places: dict[int, int] = {}
        filled = 0
        for i in sorted(small):
            offset, nbytes = self._parts[i][0], aligned(self._nbytes(i))
            places[i] = filled
            if runs and runs[-1].slot + runs[-1].nbytes == offset:
                runs[-1] = Run(runs[-1].slot, runs[-1].scratch, runs[-1].nbytes + nbytes)
            else:
                runs.append(Run(offset, filled, nbytes))
            filled += nbytes
        return tuple(runs), places

    def _dense(self, positions: list[int], scratch: torch.Tensor) -> Batch:
        places: dict[int, int] = {}
        filled = 0
        for i in positions:
            places[i] = filled
            filled += self._nbytes(i)
        return self._batch(scratch, places, tuple(self._parts[i][:2] for i in positions))

    def _batch(self, scratch: torch.Tensor, places: dict[int, int], pieces: tuple[tuple[int, int], ...]) -> Batch:
        nbytes = sum(n for _, n in pieces)
        row = self._placed(Row(pieces)) if self._checksums else None
        return Batch(self._gatherings(places, scratch), scratch[:nbytes], row)

    def _gatherings(self, places: dict[int, int], scratch: torch.Tensor) -> tuple[Gathering, ...]:
        kinds: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for i in places:
            kinds[_gathered_as(self._leaves[i].tensor.dtype)].append(i)
        return tuple(
            Gathering(
                taking(positions),
                None if all(self._leaves[i].tensor.dtype == kind for i in positions) else kind,
                [scratch[places[i] : places[i] + self._nbytes(i)].view(kind).view(self._parts[i][3]) for i in positions],
            )
            for kind, positions in kinds.items()
        )

    def _row_of(self, i: int) -> Row:
        offset, nbytes, dtype, shape = self._parts[i]
        is_contiguous = self._leaves[i].tensor.is_contiguous()
        return self._placed(Row(((offset, nbytes),)) if is_contiguous else strided(offset, shape, dtype.itemsize))

    def _placed(self, row: Row) -> Row:
        placed = replace(row, at=self._sums)
        self._sums += row.count
        return placed


_AS_THEY_ARE = {torch.float32, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}


def _gathered_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which one call copies many tensors bit for bit. It would copy 16-bit floats through 32 bits, which changes
    NaNs, and does not know every dtype.
    """
    return dtype if dtype in _AS_THEY_ARE else carrier_of(dtype) or dtype


def taking(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that takes the items at `positions` out of a list, without Python code for each."""
    if len(positions) < 2:
        return lambda items: tuple(items[i] for i in positions)
    return itemgetter(*positions)
