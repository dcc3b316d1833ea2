"""Optimizer state of another shape than its parameter: how it lay on its mesh, and how it is made where there is none yet.

Second moments in factors, or a scale for each row, are DTensors beside a parameter that is one, and a plain tensor in their
place breaks the next step. So their placements are stored, and used again on a mesh of as many dimensions of the same names.
On any other mesh they are made as the optimizer's own first step makes them, which is tried on tensors without memory.
"""

from __future__ import annotations

import collections
import copy
import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from checkpointd.layout import tree
from checkpointd.layout.strides import contiguous_stride
from checkpointd_client.sharding.dtensor import MeshLayout, axes_of, is_dtensor, rows_of


def noted(node: tree.Tensor, tensor: Any) -> tree.MeshTensor:
    """`node` with the mesh and the placements of `tensor`, a DTensor."""
    mesh = tensor._spec.mesh
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    return tree.MeshTensor(
        node.fqn,
        node.requires_grad,
        node.device,
        node.overlap,
        tuple(zip(map(int, mesh.shape), names, strict=True)),
        tuple(None if axis is None else (axis.dim, axis.pieces) for axis in axes_of(tensor._spec.placements)),
    )


@dataclass(slots=True)
class FirstStep:
    """What the optimizer's first step makes of one parameter; tried when it is first asked for."""

    optimizer: Any
    group: Mapping[str, Any]
    parameter: Any
    _made: list[Any] = field(default_factory=list)

    def at(self, path: tuple[Hashable, ...]) -> Any:
        """What stands at `path` below the state of the parameter; None where nothing does, or where no step can be tried."""
        if not self._made:
            self._made.append(_state_after_a_step(self.optimizer, self.group, self.parameter))
        value = self._made[0]
        for key in path:
            if isinstance(value, Mapping):
                value = value.get(key)
            elif isinstance(value, list | tuple) and isinstance(key, int) and 0 <= key < len(value):
                value = value[key]
            else:
                return None
        return value


def like(node: tree.Tensor, shape: tuple[int, ...], first: FirstStep, path: tuple[Hashable, ...], *, shared: bool) -> Any:
    """A DTensor without memory that says how the stored tensor of `shape` is to lie; None where it is to be a plain one.

    `shared`: ranks held it together when it was saved.
    """
    mesh, dtype = first.parameter._spec.mesh, first.parameter.dtype
    stored = _stored_placements(node, shape, mesh)
    if stored is not None:
        return _without_memory(shape, mesh, stored, dtype)
    made = first.at(path)
    if is_dtensor(made) and tuple(made.shape) == shape:
        return _without_memory(shape, made._spec.mesh, _summed(made._spec.placements), dtype)
    if made is not None or not (shared or isinstance(node, tree.MeshTensor)):
        return None
    # Right wherever the next step needs it: DTensors take from it what they lack.
    return _without_memory(shape, mesh, _summed(first.parameter._spec.placements, everywhere=True), dtype)


def _stored_placements(node: tree.Tensor, shape: tuple[int, ...], mesh: Any) -> tuple[Any, ...] | None:
    """The placements that were stored, where the mesh has the dimensions of that time, whatever their sizes."""
    if not isinstance(node, tree.MeshTensor) or not len(node.placements) == len(node.mesh) == mesh.ndim:
        return None
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    if any(was != now for (_, was), now in zip(node.mesh, names, strict=True)):
        return None
    split = [entry for entry in node.placements if entry is not None]
    # How later dimensions split it first depends on their sizes; the first step knows.
    if any(not 0 <= dim < len(shape) or pieces != 1 for dim, pieces in split):
        return None
    from torch.distributed.tensor import Replicate, Shard  # whoever made the parameter has imported it

    return tuple(Replicate() if entry is None else Shard(entry[0]) for entry in node.placements)


def _summed(placements: Any, *, everywhere: bool = False) -> tuple[Any, ...]:
    """`placements` with Replicate in place of sums that are not done yet, which cannot be filled; `everywhere`: of all."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if everywhere or placement.is_partial() else placement for placement in placements)


def _without_memory(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], dtype: torch.dtype) -> Any:
    from torch.distributed.tensor import DTensor

    coordinate = mesh.get_coordinate()
    sizes = (0,) * len(shape)
    if coordinate is not None:
        rows = rows_of(MeshLayout(shape, tuple(mesh.shape), axes_of(placements)), tuple(coordinate))
        sizes = tuple(sum(n for _, n in runs) for runs in rows)
    local = torch.empty(sizes, dtype=dtype, device="meta")
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
    )


def _state_after_a_step(optimizer: Any, group: Mapping[str, Any], parameter: Any) -> Any:
    """The state of `parameter` after a step of a copy of `optimizer` that holds only a stand-in for it, on no device; an empty
    dict where the optimizer cannot make such a step.
    """
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        return {}  # its step would be one of the optimizer that it wraps
    stand_in = _stand_in(parameter)
    stand_in.grad = _stand_in(parameter).detach()
    try:
        trial = object.__new__(type(optimizer))
        vars(trial).update(_apart({key: value for key, value in vars(optimizer).items() if key not in _OF_PARAMETERS}))
        trial.state = collections.defaultdict(dict)
        own = _apart({key: value for key, value in group.items() if key != "params"})
        trial.param_groups = [{**own, "params": [stand_in]} | ({"fused": False} if "fused" in own else {})]
        # The bare function: hooks and what schedulers wrap around it are for real steps.
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(trial)
        return trial.state.get(stand_in, {})
    except Exception:  # the user's code, which need not be able to do without elements
        return {}


_OF_PARAMETERS = frozenset({"state", "param_groups"})
"""What the trial has of its own: the state of every parameter would be much to copy."""

_COPIED_MAX = 1 << 10
"""Elements of a tensor whose values the trial sees, such as a counter. A larger one has no memory there."""


def _apart(value: Any, met: dict[int, Any] | None = None) -> Any:
    """A copy, at any depth of containers, of what a step may change in place: that must not reach the user's own.

    `met`: what was copied before, by identity, so that what stands at two places, or in itself, is still one.
    """
    met = {} if met is None else met
    if id(value) in met:
        return met[id(value)]
    if type(value) is tuple:
        return tuple(_apart(child, met) for child in value)
    if isinstance(value, torch.Tensor):
        made: Any = _tensor_apart(value)
    elif isinstance(value, dict | list | set | collections.deque | np.ndarray):
        made = copy.copy(value)
    else:
        return value
    met[id(value)] = made
    if isinstance(value, dict | list | collections.deque):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            made[key] = _apart(child, met)
    return made


def _tensor_apart(tensor: Any) -> Any:
    if tensor.numel() <= _COPIED_MAX:
        return tensor.detach().clone()
    return _like_it_without_memory(tensor.detach())


def _stand_in(parameter: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(_like_it_without_memory(parameter))


def _like_it_without_memory(tensor: Any) -> Any:
    """A tensor as `tensor` is one, on no device."""
    if not is_dtensor(tensor):
        return torch.empty_like(tensor, device="meta")
    from torch.distributed.tensor import DTensor

    spec = tensor._spec
    local = torch.empty_like(tensor._local_tensor, device="meta")
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=tensor.shape, stride=tuple(tensor.stride())
    )
