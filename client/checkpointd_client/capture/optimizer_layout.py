"""The placements of optimizer state whose shape differs from its parameter's: stored at a save, and found again at a load.

If a parameter is a DTensor, so are its factored second moments or scales per row, and a plain tensor in their place breaks the
next step. So a save stores their placements, and a load uses them on a mesh with the same dimension names. On any other mesh, a
load tries the optimizer's first step on meta tensors, and uses the placements of the state that this makes.
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
        node.stride,
        tuple(zip(map(int, mesh.shape), names, strict=True)),
        tuple(None if axis is None else (axis.dim, axis.pieces) for axis in axes_of(tensor._spec.placements)),
    )


@dataclass(slots=True)
class FirstStep:
    """The state that the optimizer's first step makes for one parameter. The step is tried when `at` is first called."""

    optimizer: Any
    group: Mapping[str, Any]
    parameter: Any
    _made: list[Any] = field(default_factory=list)

    def at(self, path: tuple[Hashable, ...]) -> Any:
        """The value at `path` in the state of the parameter; None if there is none, or if the step cannot be tried."""
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
    """A meta DTensor with the placements for the stored tensor of `shape`; None if it should become a plain tensor.

    `shared`: whether it was a distributed tensor when it was saved.
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
    # Replicate suits every step: an operation with DTensors can take any part of it.
    return _without_memory(shape, mesh, _summed(first.parameter._spec.placements, everywhere=True), dtype)


def _stored_placements(node: tree.Tensor, shape: tuple[int, ...], mesh: Any) -> tuple[Any, ...] | None:
    """The stored placements, if the mesh has the same dimension names as at the save; its sizes may differ."""
    if not isinstance(node, tree.MeshTensor) or not len(node.placements) == len(node.mesh) == mesh.ndim:
        return None
    names = mesh.mesh_dim_names or (None,) * mesh.ndim
    if any(was != now for (_, was), now in zip(node.mesh, names, strict=True)):
        return None
    split = [entry for entry in node.placements if entry is not None]
    # Strided placements depend on the sizes of the mesh, so they are not used again.
    if any(not 0 <= dim < len(shape) or pieces != 1 for dim, pieces in split):
        return None
    from torch.distributed.tensor import Replicate, Shard  # already imported, since the parameter is a DTensor

    return tuple(Replicate() if entry is None else Shard(entry[0]) for entry in node.placements)


def _summed(placements: Any, *, everywhere: bool = False) -> tuple[Any, ...]:
    """`placements` with Replicate in place of partial sums, which a load cannot fill; with `everywhere`, in place of all."""
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
    """The state of `parameter` after one step of a copy of `optimizer`, whose only parameter is a meta tensor like it; an empty
    dict if the optimizer cannot make such a step.
    """
    if any(isinstance(value, torch.optim.Optimizer) for value in vars(optimizer).values()):
        return {}  # its step would change the optimizer that it wraps
    stand_in = _stand_in(parameter)
    stand_in.grad = _stand_in(parameter).detach()
    try:
        trial = object.__new__(type(optimizer))
        vars(trial).update(_apart({key: value for key, value in vars(optimizer).items() if key not in _OF_PARAMETERS}))
        trial.state = collections.defaultdict(dict)
        own = _apart({key: value for key, value in group.items() if key != "params"})
        trial.param_groups = [{**own, "params": [stand_in]} | ({"fused": False} if "fused" in own else {})]
        # The bare function, without hooks and the wrappers of schedulers, which count real steps.
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(trial)
        return trial.state.get(stand_in, {})
    except Exception:  # the user's code, which may fail on meta tensors
        return {}


_OF_PARAMETERS = frozenset({"state", "param_groups"})
"""Attributes that the trial does not copy: the state of all parameters would be large."""

_COPIED_MAX = 1 << 10
"""The trial copies tensors of up to this many elements, such as counters. Larger ones become meta tensors."""


def _apart(value: Any, met: dict[int, Any] | None = None) -> Any:
    """A deep copy of containers and tensors, so that the trial changes no object of the user.

    `met`: copies by the id() of the original, so that an object at two places, or inside itself, has one copy.
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
    return like_without_memory(tensor.detach())


def _stand_in(parameter: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(like_without_memory(parameter))


def like_without_memory(tensor: Any) -> Any:
    """A meta tensor like `tensor`."""
    if not is_dtensor(tensor):
        return torch.empty_like(tensor, device="meta")
    from torch.distributed.tensor import DTensor

    spec = tensor._spec
    local = torch.empty_like(tensor._local_tensor, device="meta")
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=tensor.shape, stride=tuple(tensor.stride())
    )
