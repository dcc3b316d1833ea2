"""The low-bit optimizers of torchao, which choose the class of a state by the number of elements that a rank holds.

Ranks with few elements keep an ordinary tensor. So the ranks of one DTensor may keep different classes, and another number of
ranks may need other ones. The optimizer itself is asked what it keeps for a part of some shape: it makes that state on the meta
device.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from checkpointd_client.capture.tensor_kinds.kind import TensorKind
from checkpointd_client.sharding.dtensor import MeshLayout, axes_of, rows_of

_SIGNED = "exp_avg"
"""The only state that may be negative; torchao has other code books for the others."""


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Consecutive rows of a tensor, from `start` to `stop`, that ranks keep in one class. `like`: a state on the meta device as
    they keep it, of the class `kind`; None for an ordinary tensor.
    """

    start: int
    stop: int
    kind: TensorKind | None = None
    like: Any = None
    holders: tuple[tuple[int, ...], ...] = ()
    """The coordinates of the ranks in the mesh."""


def is_low_bit(optimizer: object) -> bool:
    """Whether `optimizer` is one of torchao's."""
    of_torchao = any(cls.__module__.startswith("torchao.") for cls in type(optimizer).__mro__)
    return of_torchao and callable(getattr(optimizer, "_new_buffer", None))


def is_ordinary(optimizer: object) -> bool:
    """Whether `optimizer` is one of torch's, or a subclass of one. They keep ordinary tensors, and cannot step with others."""
    modules = {cls.__module__ for cls in type(optimizer).__mro__} - {torch.optim.Optimizer.__module__}
    return any(module.startswith("torch.optim.") for module in modules)


def state_like(optimizer: Any, parameter: Any, key: object) -> Any:
    """The state that `optimizer` makes at its first step for `parameter`, a tensor or a DTensor, on its device. Its content is
    zeros, or undefined for an optimizer of torch's.
    """
    with torch.no_grad():
        if is_ordinary(optimizer):
            return torch.empty_like(parameter.detach())
        return optimizer._new_buffer(parameter.detach(), key == _SIGNED)


def spans(optimizer: Any, parameter: Any, key: object, classes: TensorClasses) -> list[RowSpan]:
    """How the ranks keep the state `key` of `parameter`, a DTensor, by rows. ValueError if a rank does not hold whole rows."""
    spec, shape = parameter._spec, tuple(parameter.shape)
    layout = MeshLayout(shape, tuple(spec.mesh.shape), axes_of(spec.placements))
    asked = type(optimizer), optimizer.block_size, key == _SIGNED, layout, parameter.dtype, torch.get_default_dtype()
    known = _known.get(asked)
    if known is None:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        known = _known[asked] = _spans(optimizer, parameter.dtype, key, layout, classes)
    return known


_known: dict[object, list[RowSpan]] = {}
_KNOWN_MAX = 1 << 14


def _spans(optimizer: Any, dtype: torch.dtype, key: object, layout: MeshLayout, classes: TensorClasses) -> list[RowSpan]:
    shape = layout.shape
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for coordinate in itertools.product(*map(range, layout.mesh_shape)):
        rows = rows_of(layout, coordinate)
        runs = [run for run in rows[0] if run[1]] if rows else []
        if len(runs) != 1 or any(others != ((0, n),) for others, n in zip(rows[1:], shape[1:], strict=True)):
            if math.prod(sum(n for _, n in one) for one in rows):
                raise ValueError("a rank holds other parts of it than consecutive whole rows")
            continue
        found.setdefault((runs[0][0], sum(runs[0])), []).append(coordinate)
    made: list[RowSpan] = []
    for (start, stop), holders in sorted(found.items()):
        like = state_like(optimizer, torch.empty((stop - start, *shape[1:]), dtype=dtype, device="meta"), key)
        like = like.view(like.shape)  # as in a DTensor, which torchao's classes give another dtype
        kind = classes.kind_of(like)
        one = RowSpan(start, stop, kind, like if kind is not None else None, tuple(holders))
        last = made[-1] if made else None
        if last is not None and (last.kind is None) == (kind is None):
            one = RowSpan(last.start, stop, last.kind, last.like, last.holders + one.holders)
            made.pop()
        made.append(one)
    return made
