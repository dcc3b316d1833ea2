"""Relates the device meshes of a state, to find the replicas of a DTensor on a part of a larger mesh.

A DTensor knows only its own mesh. If FSDP2 shards a parameter over `dp` in a model that is tensor-parallel as well, the DTensor
does not say that all ranks along `tp` are replicas. The larger mesh of another tensor in the state shows that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from checkpointd_client.sharding.dtensor import LocalShard, ReplicaGroup, is_dtensor, mesh_group, replicated, spread


def beyond(meshes: Iterable[Any]) -> dict[Any, ReplicaGroup]:
    """For each mesh that is a part of the largest of `meshes`: the group of ranks along the dimensions that it lacks.

    Tensors on such a part are equal along the other dimensions. Dimensions are compared by the ranks that they join, so a
    dimension that was flattened from two is found as well. A mesh with dimensions that the largest one lacks is not a part of
    it, even if its ranks are: experts on their own mesh may differ on ranks where the dense layers are equal.
    """
    distinct = dict.fromkeys(meshes)
    if len(distinct) < 2:
        return {}
    largest = max(distinct, key=lambda mesh: (mesh.size(), mesh.ndim))
    coordinate = largest.get_coordinate()
    if coordinate is None:
        return {}
    ranks, found = largest.mesh, {}
    for mesh in distinct:
        is_part = mesh.size() < largest.size() and _is_related(mesh, largest)
        others = _other_dims(ranks, tuple(coordinate), mesh) if is_part else None
        if others:
            group = ReplicaGroup(0, 1)
            for dim in others:
                group = group.times(ReplicaGroup(coordinate[dim], largest.size(dim)))
            found[mesh] = group
    return found


def _is_related(part: Any, largest: Any) -> bool:
    """Whether both were cut from one mesh, or all names of `part` are names of `largest`, or one of them has no names."""
    if part._get_root_mesh() == largest._get_root_mesh():
        return True
    if part.mesh_dim_names is None or largest.mesh_dim_names is None:
        return bool(part.size() > 1)  # a mesh of one rank would be a part of any mesh
    return set(part.mesh_dim_names) <= set(largest.mesh_dim_names)


def _other_dims(ranks: torch.Tensor, coordinate: tuple[int, ...], part: Any) -> tuple[int, ...] | None:
    """The dimensions of a mesh of `ranks` that `part` lacks; None if `part` is not its slice through `coordinate`."""
    wanted = sorted(part.mesh.flatten().tolist())
    dims = range(ranks.dim())
    for count in range(1, ranks.dim() + 1):
        for others in itertools.combinations(dims, count):
            if math.prod(ranks.shape[dim] for dim in others) * len(wanted) != ranks.numel():
                continue
            cut: Any = tuple(coordinate[dim] if dim in others else slice(None) for dim in dims)
            if sorted(ranks[cut].flatten().tolist()) == wanted:
                return others
    return None


@dataclass(slots=True)
class Loose:
    """DTensors outside modules, such as in a module's state_dict or an average of its weights. Their replicas are found at the
    end of the walk, from the largest mesh of the whole state.
    """

    _tensors: dict[int, Any] = field(default_factory=dict)
    """By position in the walk."""
    _beside: dict[int, tuple[Any, tuple[int, ...]]] = field(default_factory=dict)
    """Plain optimizer state of DTensors: by position, the parameter and the shape of the state."""

    def note(self, position: int, tensor: Any) -> None:
        """Note a DTensor outside modules."""
        self._tensors[position] = tensor

    def note_beside(self, position: int, parameter: Any, shape: Sequence[int]) -> None:
        """Note plain state of `parameter`, a DTensor outside modules. All ranks of its mesh have this state as replicas."""
        self._beside[position] = parameter, tuple(shape)

    def settle(self, held: dict[int, LocalShard], shown: Iterable[Any]) -> None:
        """Enter the replicas of the noted tensors in `held`. `shown`: all DTensors of the state, also those in modules."""
        if not self._tensors and not self._beside:
            return
        members = itertools.chain(shown, (parameter for parameter, _ in self._beside.values()))
        outer = beyond(tensor._spec.mesh for tensor in members if is_dtensor(tensor))
        for position, tensor in self._tensors.items():
            around = outer.get(tensor._spec.mesh)
            if around is not None:
                held[position] = spread(held[position], around)
        for position, (parameter, shape) in self._beside.items():
            group, around = mesh_group(parameter), outer.get(parameter._spec.mesh)
            if group is not None:
                held[position] = replicated(shape, group if around is None else around.times(group))
