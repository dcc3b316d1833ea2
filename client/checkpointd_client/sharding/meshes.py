"""Relates the device meshes of a state, to find the replicas of a DTensor on a part of a larger mesh.

A DTensor carries its mesh, and no more. Of a parameter that FSDP2 shards over `dp`, in a model that is tensor-parallel as well,
it does not say that all ranks along `tp` hold the same. Another tensor of the state shows it, by a larger mesh.
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
    """For each mesh that is a part of the largest of `meshes`: the ranks of that one that differ in its other dimensions alone.

    What lies on fewer dimensions is the same along the others. Dimensions are told by the ranks that they join, so that a
    dimension that was made of two does not matter. A mesh of dimensions that the largest one does not have is no part of it,
    though its ranks are: experts on a mesh of their own may differ wherever the dense layers are the same.
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
    """Whether both were cut from one mesh, or their dimensions have the same names, or none of which could tell them apart."""
    if part._get_root_mesh() == largest._get_root_mesh():
        return True
    if part.mesh_dim_names is None or largest.mesh_dim_names is None:
        return bool(part.size() > 1)  # a mesh of one rank is a part of every mesh, and says nothing
    return set(part.mesh_dim_names) <= set(largest.mesh_dim_names)


def _other_dims(ranks: torch.Tensor, coordinate: tuple[int, ...], part: Any) -> tuple[int, ...] | None:
    """The dimensions of a mesh of `ranks` that `part` does not have; None where it is no slice of it through `coordinate`."""
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
    """DTensors that stand in no module, as in the state_dict of one, or in an average of its weights: planned together when
    all of the state has been seen, on the largest mesh that it shows.
    """

    _tensors: dict[int, Any] = field(default_factory=dict)
    """By position in the walk."""
    _beside: dict[int, tuple[Any, tuple[int, ...]]] = field(default_factory=dict)
    """Plain state of a DTensor: the position, that DTensor, and the shape of the state."""

    def note(self, position: int, tensor: Any) -> None:
        """A DTensor that no module explains."""
        self._tensors[position] = tensor

    def note_beside(self, position: int, parameter: Any, shape: Sequence[int]) -> None:
        """Plain state that the ranks hold together which hold `parameter`, a DTensor that no module explains."""
        self._beside[position] = parameter, tuple(shape)

    def settle(self, held: dict[int, LocalShard], shown: Iterable[Any]) -> None:
        """Enter what was noted in `held`. `shown` are all DTensors of the state, those of modules included."""
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
