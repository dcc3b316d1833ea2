"""The tensors of a captured state, in columns: a save of many tensors makes no object for each of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from checkpointd_client.sharding.dtensor import LocalBox


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One tensor to store.

    `tensor` is a live, detached view of the user's memory (no copy): it may be non-contiguous, expanded, on any device, and
    shares the version counter of the user's tensor. `dtype` is torch's name without `torch.`. `optimizer_only` says that it
    changes solely inside `optimizer.step()`: a parameter in the param_groups of, or a state tensor of, an optimizer in the
    state. `part`: the box of a distributed tensor that `tensor` is; None if the whole tensor is this rank's own.
    """

    fqn: str
    tensor: torch.Tensor
    dtype: str
    optimizer_only: bool
    part: LocalBox | None = None


_OUTER = "_checkpointd_outer"


def note_outer(tensor: torch.Tensor, outer: torch.Tensor) -> None:
    """Note that `tensor` is an inner tensor of `outer`. torch counts a change that is made through `outer` only there."""
    setattr(tensor, _OUTER, outer)


def outer_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The composite tensor that was noted for `tensor`; None if there is none."""
    found: torch.Tensor | None = getattr(tensor, _OUTER, None)
    return found


def version_of(tensor: torch.Tensor) -> int | None:
    """How many changes torch has counted of a leaf, also through the tensor that it is a part of; None if it counts none."""
    if tensor.is_inference():
        return None
    outer = outer_of(tensor)
    return tensor._version + (0 if outer is None or outer.is_inference() else outer._version)


@dataclass(frozen=True, slots=True)
class Columns:
    """All that leaves tell except their tensors, as `Leaf` has it, by the position of the leaf."""

    fqns: list[str]
    dtypes: list[str]
    optimizer_only: list[bool]
    parts: list[LocalBox | None]

    def at(self, positions: Sequence[int]) -> Columns:
        """Those of some leaves."""
        columns: tuple[list[Any], ...] = (self.fqns, self.dtypes, self.optimizer_only, self.parts)
        return Columns(*([column[i] for i in positions] for column in columns))


@dataclass(frozen=True, slots=True, eq=False)
class Leaves(Sequence[Leaf]):
    """A sequence of leaves. `tensors` may be the user's own tensors: whoever keeps one after save() detaches it, so that it
    stays the memory that it was.

    `columns`: all leaves with the same object agree in everything but their tensors. Those of them that are optimizer-only
    have the same addresses and strides as well.
    """

    columns: Columns
    tensors: Sequence[torch.Tensor]

    @classmethod
    def of(cls, leaves: Iterable[Leaf]) -> Leaves:
        """`leaves` as columns."""
        rows = [(leaf.fqn, leaf.dtype, leaf.optimizer_only, leaf.part, leaf.tensor) for leaf in leaves]
        fqns, dtypes, by_steps, parts, tensors = map(list, zip(*rows, strict=True)) if rows else ([], [], [], [], [])
        return cls(Columns(fqns, dtypes, by_steps, parts), tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @overload
    def __getitem__(self, index: int) -> Leaf: ...
    @overload
    def __getitem__(self, index: slice) -> Leaves: ...
    def __getitem__(self, index: int | slice) -> Leaf | Leaves:
        columns = self.columns
        if isinstance(index, slice):
            return Leaves(columns.at(range(len(self))[index]), self.tensors[index])
        return Leaf(
            columns.fqns[index],
            self.tensors[index].detach(),
            columns.dtypes[index],
            columns.optimizer_only[index],
            columns.parts[index],
        )
