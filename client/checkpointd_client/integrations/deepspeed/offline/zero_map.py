"""Finds every parameter, and its optimizer state, in the files of a ZeRO checkpoint.

At stages 1 and 2 the parameters of a group follow each other in one row that continues from rank to rank and is padded at its
end. At stage 3 every rank has a row of its own, with equally many elements of each parameter on every rank, the last ones
padded.

Invariants
  ZEROMAP-1  The elements of a parameter are those of its pieces, one after the other, without padding.
  ZEROMAP-2  Every piece lies inside its tensor: the sizes in the files were checked against each other.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from checkpointd.errors import DamagedError
from checkpointd_client.integrations.deepspeed.offline.zero_files import ZeroFiles, checked, flat_tensor

log = logging.getLogger("checkpointd")

STEP = "step"


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """`count` elements of a flat tensor, from element `at` on."""

    tensor: torch.Tensor
    at: int
    count: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A tensor whose elements are still in the files."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[FlatPiece, ...]

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> torch.Tensor:
        """The tensor, in memory of its own."""
        made = torch.empty(self.shape, dtype=self.dtype)
        self.copy(0, made.view(-1))
        return made

    def copy(self, start: int, target: torch.Tensor) -> None:
        """Fill `target`, a flat tensor of this dtype, with the elements from `start` on."""
        stop, at = start + target.numel(), 0
        for piece in self.pieces:
            begin, end = max(start, at), min(stop, at + piece.count)
            if begin < end:
                first = piece.at + begin - at
                source = piece.tensor[first : first + end - begin]
                target[begin - start : end - start] = source
                drop(source)
            at += piece.count


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Flat tensors that follow each other."""

    tensors: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    def pieces(self, start: int, stop: int) -> Iterator[FlatPiece]:
        """Elements `[start, stop)` of the row."""
        at = 0
        for tensor in self.tensors:
            begin, end = max(start, at), min(stop, at + tensor.numel())
            if begin < end:
                yield FlatPiece(tensor, begin - at, end - begin)
            at += tensor.numel()


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter that the optimizer steps: its fp32 master, and the base optimizer's state for each of its elements.

    `values` are kept once for all parameters that lie in one tensor with this one, such as the step. `group`: the number of
    its param group.
    """

    master: Mapped
    group: int
    states: Mapping[str, Mapped] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ZeroMap:
    """The content of the files, by the names of the parameters. `unknown`: keys of optimizer state of an unknown form."""

    trained: Mapping[str, Parameter]
    frozen: Mapping[str, Mapped]
    groups: tuple[Mapping[str, Any], ...]
    unknown: tuple[str, ...] = ()


def map_files(files: ZeroFiles) -> ZeroMap:
    """Find everything in `files`. DamagedError, with the file, if sizes contradict each other."""
    if files.stage == 3:
        return _Stage3(files).map()
    return _Stage12(files).map()


def mapped_tensor(value: Any, path: str, what: str) -> Mapped:
    """A whole tensor of a file."""
    tensor: torch.Tensor = checked(value, torch.Tensor, path, what)
    if tensor.layout is not torch.strided:
        raise DamagedError(f"{path}: {what} is not a plain tensor", key=path)
    flat = tensor.detach().reshape(-1)
    return Mapped(tensor.shape, tensor.dtype, (FlatPiece(flat, 0, flat.numel()),))


class _Mapping(ABC):
    """The base of both stages: reads the base optimizer's state, by the number of the tensor that it steps."""

    def __init__(self, files: ZeroFiles) -> None:
        self.files = files
        self.unknown: dict[str, None] = {}
        self.base = [self._base(rank) for rank in range(files.ranks)]
        self.groups = self._groups()

    @abstractmethod
    def _base(self, rank: int) -> Mapping[str, Any]:
        """The state_dict of the base optimizer of `rank`."""

    def _groups(self) -> tuple[Mapping[str, Any], ...]:
        path = self.files.optims[0].path
        groups = checked(self.base[0].get("param_groups", []), list, path, "param_groups")
        return tuple(checked(group, dict, path, "param_groups") for group in groups)

    def _states(self, rank: int) -> list[Mapping[str, Any]]:
        """The state of each tensor that the optimizer steps, in their order."""
        path, base = self.files.optims[rank].path, self.base[rank]
        states = base.get("state", {})
        if isinstance(states, list):
            return [checked(state, dict, path, "base_optimizer_state") for state in states]
        numbers = [number for group in self.groups for number in checked(group.get("params"), list, path, "params")]
        return [checked(checked(states, dict, path, "state").get(number, {}), dict, path, "state") for number in numbers]

    def kinds(self, number: int, master: Sequence[torch.Tensor]) -> tuple[dict[str, list[torch.Tensor]], dict[str, Any]]:
        """The state of tensor `number` by key: first the state of its elements, as the ranks' parts in order, then single
        values.

        `master`: the part of each rank, perhaps without padding.
        """
        kept = [self._states(rank) for rank in range(self.files.ranks)]
        if not any(kept):
            return {}, {}
        states: list[Mapping[str, Any]] = []
        for rank, found in enumerate(kept):
            if number >= len(found) or found[number].keys() != kept[0][number].keys():
                raise self.files.fault(rank, f"has other states of tensor {number} than {self.files.optims[0].path}")
            states.append(found[number])
        elements: dict[str, list[torch.Tensor]] = {}
        once: dict[str, Any] = {}
        for key, value in states[0].items():
            if key != STEP and isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() >= master[0].numel():
                elements[key] = [
                    self._fitting(rank, state[key], f"{key} of tensor {number}", master[rank])
                    for rank, state in enumerate(states)
                ]
            elif isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
                once[key] = value
            else:
                self.unknown[str(key)] = None
        return elements, once

    def _fitting(self, rank: int, value: Any, what: str, master: torch.Tensor) -> torch.Tensor:
        tensor = flat_tensor(value, self.files.optims[rank].path, what)
        if tensor.numel() < master.numel():
            raise self.files.fault(rank, f"has {tensor.numel()} elements of {what}, fewer than of the weights")
        return tensor

    def flats(self, key: str) -> list[list[torch.Tensor]]:
        """The flat masters of each rank; their number must be the same on all."""
        found = []
        for rank in range(self.files.ranks):
            path = self.files.optims[rank].path
            tensors = checked(self.files.optimizer(rank).get(key), list, path, key)
            found.append([flat_tensor(tensor, path, f"{key}.{number}") for number, tensor in enumerate(tensors)])
            if len(found[rank]) != len(found[0]):
                raise self.files.fault(rank, f"has {len(found[rank])} groups in {key}, but rank 0 has {len(found[0])}")
        return found


class _Stage12(_Mapping):
    def _base(self, rank: int) -> Mapping[str, Any]:
        found = self.files.optimizer(rank).get("base_optimizer_state")
        # An elastic checkpoint has a list, without padding.
        return {"state": found} if isinstance(found, list) else _dict(found, self.files.optims[rank].path, "state")

    def map(self) -> ZeroMap:
        flats, shapes = self.flats("single_partition_of_fp32_groups"), self.files.param_shapes
        if len(shapes) != len(flats[0]):
            raise self.files.fault(0, f"has {len(flats[0])} groups, but {self.files.model.path} names {len(shapes)}")
        trained: dict[str, Parameter] = {}
        for number, group in enumerate(shapes):
            masters = [parts[number] for parts in flats]
            elements, once = self.kinds(number, masters)
            row, rows = TensorRow(tuple(masters)), {key: TensorRow(tuple(parts)) for key, parts in elements.items()}
            at = 0
            for (name, shape), padding in zip(group.items(), self._paddings(number, len(group)), strict=True):
                end = at + math.prod(shape)
                self._check_ends(row, end, number)
                states = {key: _mapped(shape, found.pieces(at, end), found) for key, found in rows.items()}
                trained[name] = Parameter(_mapped(shape, row.pieces(at, end), row), number, states, once)
                at = end + padding
            self._check_ends(row, at, number, last=True)
        return ZeroMap(trained, self._frozen(), self.groups, tuple(self.unknown))

    def _paddings(self, number: int, count: int) -> Sequence[int]:
        """The padding behind each parameter of a group, if parameters were aligned."""
        path, found = self.files.optims[0].path, self.files.optimizer(0).get("param_alignment_paddings")
        if found is None:
            return [0] * count
        groups = checked(found, list, path, "param_alignment_paddings")
        paddings: list[Any] = checked(groups[number] if number < len(groups) else None, list, path, "a group's paddings")
        if len(paddings) != count or not all(isinstance(one, int) and one >= 0 for one in paddings):
            raise self.files.fault(0, f"does not have one padding for each parameter of group {number}")
        return paddings

    def _check_ends(self, row: TensorRow, end: int, number: int, *, last: bool = False) -> None:
        """Check that a row is as long as its parameters, rounded up to a multiple of twice the number of ranks."""
        step = 2 * self.files.ranks
        if end > row.size or (last and -(-end // step) != -(-row.size // step)):
            raise self.files.fault(
                self.files.ranks - 1,
                f"and those of the other ranks have {row.size} elements of group {number}, but its parameters need {end}",
            )

    def _frozen(self) -> dict[str, Mapped]:
        model, shapes = self.files.model, self.files.frozen_shapes
        fragments = checked(model.content.get("frozen_param_fragments") or {}, dict, model.path, "frozen_param_fragments")
        return {name: mapped_tensor(fragments.get(name), model.path, name) for name in shapes if fragments}


class _Stage3(_Mapping):
    def _base(self, rank: int) -> Mapping[str, Any]:
        found = self.files.optimizer(rank).get("optimizer_state_dict")
        return _dict(found, self.files.optims[rank].path, "optimizer_state_dict")

    def map(self) -> ZeroMap:
        flats = self.flats("fp32_flat_groups")
        for rank, parts in enumerate(flats):
            sizes = [part.numel() for part in parts]
            if sizes != [part.numel() for part in flats[0]]:
                raise self.files.fault(rank, f"has sub-groups of {sizes} elements, but rank 0 has other sizes")
        rows = [TensorRow(tuple(parts)) for parts in flats]
        kept = [self.kinds(number, [parts[number] for parts in flats]) for number in range(len(flats[0]))]
        ends = list(itertools.accumulate(part.numel() for part in flats[0]))
        trained: dict[str, Parameter] = {}
        at = 0
        for name, shape in ((name, shape) for group in self.files.param_shapes for name, shape in group.items()):
            size = -(-math.prod(shape) // self.files.ranks)
            number = next((n for n, end in enumerate(ends) if at < end), len(ends) - 1)
            trained[name] = self._parameter(shape, rows, at, size, number, kept, ends)
            at += size
        if at != rows[0].size:
            raise self.files.fault(0, f"has {rows[0].size} elements, but the parameters of {self.files.model.path} need {at}")
        return ZeroMap(trained, self._frozen(), self.groups, tuple(self.unknown))

    def _parameter(
        self,
        shape: tuple[int, ...],
        rows: Sequence[TensorRow],
        at: int,
        size: int,
        number: int,
        kept: Sequence[tuple[dict[str, list[torch.Tensor]], dict[str, Any]]],
        ends: Sequence[int],
    ) -> Parameter:
        elements, once = kept[number] if kept else ({}, {})
        begin = ends[number] - rows[0].tensors[number].numel()
        states = {
            key: _over_ranks(shape, [TensorRow((part,)) for part in parts], at - begin, size) for key, parts in elements.items()
        }
        return Parameter(_over_ranks(shape, rows, at, size), self._group_of(number), states, once)

    def _group_of(self, number: int) -> int:
        """The number of the param group that sub-group `number` belongs to."""
        for group, settings in enumerate(self.groups):
            count = len(settings.get("params", ()))
            if number < count:
                return group
            number -= count
        return max(len(self.groups) - 1, 0)

    def _frozen(self) -> dict[str, Mapped]:
        found: dict[str, Mapped] = {}
        for name, shape in self.files.frozen_shapes.items():
            parts = []
            for model in self.files.models:
                fragments = model.content.get("frozen_param_fragments")
                if fragments is None:
                    return {}
                parts.append(flat_tensor(checked(fragments, dict, model.path, "frozen").get(name), model.path, name))
            row = TensorRow(tuple(parts))
            if row.size < math.prod(shape):
                raise DamagedError(
                    f"{self.files.path}: {name} has {row.size} elements in the ranks' files, but needs {math.prod(shape)}",
                    key=self.files.model.path,
                    fqn=name,
                )
            found[name] = _mapped(shape, row.pieces(0, math.prod(shape)), row)
        return found


def latest(values: list[Any], key: Hashable) -> Any:
    """One value for all parameters that are stepped together. If theirs differ, since some parameters had no gradient in some
    steps, the largest.
    """
    numbers = [value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value for value in values]
    if len(values) == 1 or all(number == numbers[0] for number in numbers[1:]):
        return values[0]
    log.warning("%s differs between parameters that this ZeRO stage steps together: the largest is used", key)
    return values[numbers.index(max(numbers))]


def _dict(value: Any, path: str, what: str) -> Mapping[str, Any]:
    """A missing dict is empty: the optimizer has not stepped yet."""
    found: Mapping[str, Any] = checked({} if value is None else value, dict, path, what)
    return found


def _mapped(shape: tuple[int, ...], pieces: Iterator[FlatPiece], row: TensorRow) -> Mapped:
    return Mapped(torch.Size(shape), row.tensors[0].dtype, tuple(pieces))


def _over_ranks(shape: tuple[int, ...], rows: Sequence[TensorRow], at: int, size: int) -> Mapped:
    """`size` elements of every rank's row from `at` on, without the padding at the end."""
    left = math.prod(shape)
    pieces: list[FlatPiece] = []
    for row in rows:
        pieces += row.pieces(at, at + min(size, left))
        left -= min(size, left)
    return Mapped(torch.Size(shape), rows[0].tensors[0].dtype, tuple(pieces))


_PAGEOUT = 21
"""MADV_PAGEOUT of Linux 5.4 and later (madvise(2)): it drops clean pages of files and never changes memory."""


def drop(tensor: torch.Tensor) -> None:
    """Drop the pages of a contiguous tensor, which are read again on demand. Does nothing if that is not possible."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    stop = (tensor.data_ptr() + tensor.numel() * tensor.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
    if stop > first and sys.platform == "linux":
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(stop - first), _PAGEOUT)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
