"""The modules of a state: their tensors under clean names, which ranks hold the same, and what every parameter is called.

An optimizer names its parameters by these names, wherever in the state its module stands, so that what is stored of it survives
another order of parameters, another wrapping, and another split of the model over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd_client.capture import objects
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import (
    FlatShard,
    LocalShard,
    ReplicaGroup,
    group_of,
    is_dtensor,
    is_sharded,
    mesh_group,
    replicated,
)
from checkpointd_client.sharding.meshes import beyond


@dataclass(frozen=True, slots=True, eq=False)
class StateModule:
    """One module of a state. `tensors`: its state_dict, by its own keys; `renamed`: of those, the ones stored under another."""

    fqn: str
    module: nn.Module
    tensors: dict[str, Any]
    renamed: Mapping[str, str]
    replicas: tuple[Replicas, ...]
    beyond: Mapping[Any, ReplicaGroup]
    """By mesh: the ranks of the module's whole mesh that hold the same of what lies on that part of it."""
    is_flat: bool
    """Whether FullyShardedDataParallel is in it."""

    def name(self, key: str) -> str:
        """What the tensor at `key` is stored under, below the module's FQN."""
        return self.renamed.get(key, key)

    def held(self, key: str) -> LocalShard | None:
        """Whether ranks hold the plain tensor at `key` together, and how; None where it is this rank's own."""
        value = self.tensors[key]
        around = self.replicated(key) if isinstance(value, torch.Tensor) and not is_sharded(value) else None
        return None if around is None else around.held(value)

    def replicated(self, key: str) -> Replicas | None:
        """The DistributedDataParallel that the tensor at `key` is in, and that does not ignore it."""
        for around in self.replicas:
            if key.startswith(around.prefix):
                return None if key.removeprefix(around.prefix) in around.ignored else around
        return None


@dataclass(frozen=True, slots=True)
class Replicas:
    """What DistributedDataParallel keeps equal below the keys that begin with `prefix`: parameters always, buffers as it
    broadcasts rank 0's before a forward pass.
    """

    prefix: str
    group: ReplicaGroup
    buffers: bool
    ignored: frozenset[str]

    def held(self, value: torch.Tensor) -> LocalShard | None:
        """How its ranks hold this tensor of it."""
        if isinstance(value, nn.Parameter):
            return replicated(tuple(value.shape), self.group)
        # Until then each rank has its own: the one that the others will be given is written, and by who has it.
        return replicated(tuple(value.shape), self.group, first_writes=True) if self.buffers else None


def _replicas_in(wrapped: nn.Module, fqn: str, keys: Mapping[str, object]) -> tuple[Replicas, ...]:
    """What DistributedDataParallel around the module, or around parts of it, keeps equal."""
    module: Any = wrapped
    while (inner := objects.inner_name(module)) is not None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return (_replicas_of(module, fqn, ""),)
        module = getattr(module, inner)
    if not any(".module." in key for key in keys):
        return ()
    parts = ((path, part) for path, part in module.named_modules() if isinstance(part, nn.parallel.DistributedDataParallel))
    return tuple(_replicas_of(part, f"{fqn}.{path}", f"{path}.module.") for path, part in parts)


def _replicas_of(module: nn.parallel.DistributedDataParallel, fqn: str, prefix: str) -> Replicas:
    _refuse_taken_apart(module, fqn)
    ignored = frozenset(module.parameters_to_ignore)
    return Replicas(prefix, group_of(module.process_group), bool(module.broadcast_buffers), ignored)


def _refuse_taken_apart(module: Any, fqn: str) -> None:
    """Given a device_mesh, it replaces tensor-parallel parameters by plain ones, and those by attributes once it has run."""
    if getattr(module, "device_mesh", None) is None:
        return
    for path, part in module.module.named_modules():
        parameters = [name for name, p in part._parameters.items() if hasattr(p, "_st_info")]
        for name in (*parameters, *(name for name, value in vars(part).items() if is_dtensor(value))):
            raise StateError(
                f"{f'{fqn}.{path}' if path else fqn}.{name}: DistributedDataParallel(device_mesh=...) takes tensor-parallel "
                "parameters apart, and state_dict() does not have them after a step: use fully_shard on the other dimension of "
                "the mesh"
            )


def state_module(wrapped: nn.Module, fqn: str) -> StateModule:
    """The module as it is stored."""
    module = objects.unwrap(wrapped)
    is_flat = fsdp1.is_flat(module)
    tensors = fsdp1.module_tensors(module, fqn) if is_flat else objects.module_tensors(module, fqn)
    meshes = {id(mesh): mesh for value in tensors.values() if is_dtensor(value) for mesh in (value._spec.mesh,)}
    outer = beyond(meshes.values())
    replicas = () if is_flat else _replicas_in(wrapped, fqn, tensors)
    return StateModule(fqn, module, tensors, {} if is_flat else objects.clean_names(module, tensors), replicas, outer, is_flat)


def modules_in(value: object, fqn: str, depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """The modules in nested dicts, lists and tuples, with their FQNs."""
    if isinstance(value, nn.Module):
        yield fqn, value
    elif depth < _DEPTH_MAX and isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, child in items:
            yield from modules_in(child, f"{fqn}.{key}" if fqn else str(key), depth + 1)


_DEPTH_MAX = 8
"""Modules and optimizers stand near the top of a state; what lies deeper is numbered as ever."""


@dataclass(slots=True)
class Modules:
    """The modules of one state, each looked at once."""

    state: Mapping[str, object]
    _parts: dict[int, tuple[nn.Module, StateModule]] = field(default_factory=dict)
    _names: dict[int, str] | None = None
    _groups: dict[int, ReplicaGroup] = field(default_factory=dict)
    _beyond: dict[int, ReplicaGroup] = field(default_factory=dict)
    _shards: dict[int, list[FlatShard]] = field(default_factory=dict)

    def part(self, wrapped: nn.Module, fqn: str) -> StateModule:
        """The module, under the FQN where it is first met."""
        known = self._parts.get(id(wrapped))
        if known is None:
            known = self._parts[id(wrapped)] = (wrapped, state_module(wrapped, fqn))
        return known[1]

    def names(self) -> dict[int, str]:
        """What every parameter of every module is called, by its identity; the first name of one that has several."""
        if self._names is None:
            self._names = {}
            for name, key, tensor, part in self._tensors():
                self._names.setdefault(id(tensor), name)
                self._note(key, tensor, part)
        return self._names

    def shards(self) -> dict[int, list[FlatShard]]:
        """What parameters in FullyShardedDataParallel are made of, by the identity of those that optimizers know."""
        self.names()
        return self._shards

    def all_names(self) -> dict[str, Any]:
        """Every parameter by each of its names."""
        return {name: tensor for name, _, tensor, _ in self._tensors()}

    def group(self, parameter: Any) -> ReplicaGroup | None:
        """The ranks that hold the same of what is plain in the state of `parameter`; None where each has its own."""
        self.names()
        if not is_dtensor(parameter):
            return self._groups.get(id(parameter))
        group, outer = mesh_group(parameter), self.beyond(parameter)
        return group if group is None or outer is None else outer.times(group)

    def explains(self, parameter: Any) -> bool:
        """Whether a module of the state has `parameter`, and so tells which ranks hold it."""
        return id(parameter) in self.names()

    def beyond(self, parameter: Any) -> ReplicaGroup | None:
        """The ranks outside the mesh of a sharded parameter that hold the same of it and of its state."""
        self.names()
        return self._beyond.get(id(parameter))

    def _note(self, key: str, tensor: Any, part: StateModule) -> None:
        if type(tensor) is FlatShard:
            if id(tensor) not in self._groups:
                self._groups[id(tensor)] = tensor.holders
                self._shards.setdefault(id(tensor.parameter), []).append(tensor)
        elif is_dtensor(tensor):
            outer = part.beyond.get(tensor._spec.mesh)
            if outer is not None:
                self._beyond.setdefault(id(tensor), outer)
        elif (around := part.replicated(key)) is not None:
            self._groups.setdefault(id(tensor), around.group)

    def _tensors(self) -> Iterator[tuple[str, str, Any, StateModule]]:
        for fqn, wrapped in modules_in(dict(self.state), ""):
            part = self.part(wrapped, fqn)
            for key, value in part.tensors.items():
                if isinstance(value, nn.Parameter | FlatShard):
                    yield f"{part.fqn}.{part.name(key)}", key, value, part
