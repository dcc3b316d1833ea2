"""The modules of a state: their tensors under clean names, the replicas of their tensors, and the names of parameters.

The stored state of an optimizer uses these names for its parameters. So it can be loaded with another order of parameters,
another wrapper, or another split of the model over ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd_client.capture import objects
from checkpointd_client.capture.plain.containers import pairs_in
from checkpointd_client.capture.scalars import key_text
from checkpointd_client.sharding import fsdp1, wrappers
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
from checkpointd_client.sharding.wrappers import Names


@dataclass(frozen=True, slots=True, eq=False)
class StateModule:
    """One module of a state. `tensors`: its state_dict. `attributes`: what that dict has beside its items, as it is stored."""

    fqn: str
    module: nn.Module
    tensors: dict[str, Any]
    names: Names
    attributes: Mapping[str, Any]
    replicas: tuple[Replicas, ...]
    beyond: Mapping[Any, ReplicaGroup]
    """By mesh that is a part of the module's whole mesh: the ranks outside it that hold replicas (`meshes.beyond`)."""
    is_flat: bool
    """Whether a part of the module is in FullyShardedDataParallel."""

    def name(self, key: str) -> str:
        """The stored name of the tensor at `key`, below the module's FQN."""
        return self.names.clean(key)

    def held(self, key: str, shape: tuple[int, ...]) -> LocalShard | None:
        """The local shard of the plain tensor at `key`, or of its inner tensor, if it has replicas; None if it is this rank's
        own. `shape`: that of the memory.
        """
        value = self.tensors[key]
        around = self.replicated(key) if isinstance(value, torch.Tensor) and not is_sharded(value) else None
        return None if around is None else around.held(value, shape)

    def replicated(self, key: str) -> Replicas | None:
        """The DistributedDataParallel that keeps the tensor at `key` equal on its ranks; None if there is none."""
        name = self.name(key) if self.replicas else key
        for around in self.replicas:
            if name.startswith(around.prefix):
                return None if name.removeprefix(around.prefix) in around.ignored else around
        return None


@dataclass(frozen=True, slots=True)
class Replicas:
    """The replicas of a DistributedDataParallel at the names that begin with `prefix`. Its parameters are always equal. Its
    `buffers`, if True, are equal after it has broadcast those of rank 0 before a forward pass.
    """

    prefix: str
    group: ReplicaGroup
    buffers: bool
    ignored: frozenset[str]

    def held(self, value: torch.Tensor, shape: tuple[int, ...]) -> LocalShard | None:
        """The local shard of memory of one of its tensors; None if each rank has its own."""
        if isinstance(value, nn.Parameter):
            return replicated(shape, self.group)
        # Before the broadcast, the buffers may differ. Rank 0 writes its own, since the others will get it.
        return replicated(shape, self.group, first_writes=True) if self.buffers else None


def _replicas_in(wrapped: nn.Module, fqn: str, keys: Mapping[str, object], names: Names) -> tuple[Replicas, ...]:
    """The replicas of each DistributedDataParallel around the module or around a part of it."""
    module: Any = wrapped
    while (inner := wrappers.inner_name(module)) is not None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return (_replicas_of(module, fqn, ""),)
        module = getattr(module, inner)
    if not any("module." in key for key in keys):
        return ()
    parts = ((path, part) for path, part in module.named_modules() if isinstance(part, nn.parallel.DistributedDataParallel))
    return tuple(
        _replicas_of(part, f"{fqn}.{path}", f"{clean}." if (clean := names.clean(path)) else "") for path, part in parts
    )


def _replicas_of(module: nn.parallel.DistributedDataParallel, fqn: str, prefix: str) -> Replicas:
    _refuse_taken_apart(module, fqn)
    inside = Names(module.module, module.parameters_to_ignore)
    ignored = frozenset(map(inside.clean, module.parameters_to_ignore))
    return Replicas(prefix, group_of(module.process_group), bool(module.broadcast_buffers), ignored)


def _refuse_taken_apart(module: Any, fqn: str) -> None:
    """Refuse DistributedDataParallel(device_mesh=...): it replaces tensor-parallel parameters by plain ones and, after the
    first step, by attributes that are not parameters.
    """
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
    """Look at one module of a state."""
    module = wrappers.unwrap(wrapped)
    is_flat = fsdp1.is_flat(module)
    tensors = fsdp1.module_tensors(module, fqn) if is_flat else objects.module_tensors(module, fqn)
    attributes = {objects.METADATA: fsdp1.versions(module)} if is_flat else objects.attributes_of(tensors)
    versions = attributes.get(objects.METADATA)
    versions = versions if isinstance(versions, Mapping) else {}
    names = Names(module, [*tensors, *versions])
    if versions:
        attributes[objects.METADATA] = OrderedDict((names.clean(path), version) for path, version in versions.items())
    meshes = {id(mesh): mesh for value in tensors.values() if is_dtensor(value) for mesh in (value._spec.mesh,)}
    outer = beyond(meshes.values())
    replicas = () if is_flat else _replicas_in(wrapped, fqn, tensors, names)
    return StateModule(fqn, module, tensors, names, attributes, replicas, outer, is_flat)


def modules_in(value: object, fqn: str, depth: int = 0) -> Iterator[tuple[str, nn.Module]]:
    """The modules in nested containers, with their FQNs."""
    if isinstance(value, nn.Module):
        yield fqn, value
    elif depth < _DEPTH_MAX:
        for key, child in pairs_in(value):
            yield from modules_in(child, f"{fqn}.{key_text(key)}" if fqn else key_text(key), depth + 1)


_DEPTH_MAX = 8
"""How deep modules are looked for. The optimizer of a deeper module is stored with numbers instead of names."""


@dataclass(slots=True)
class Modules:
    """The modules of one state. Each is looked at once."""

    state: Mapping[str, object]
    _parts: dict[int, tuple[nn.Module, StateModule]] = field(default_factory=dict)
    _names: dict[int, str] | None = None
    _groups: dict[int, ReplicaGroup] = field(default_factory=dict)
    _beyond: dict[int, ReplicaGroup] = field(default_factory=dict)
    _shards: dict[int, list[FlatShard]] = field(default_factory=dict)

    def part(self, wrapped: nn.Module, fqn: str) -> StateModule:
        """The module under the FQN of the first call."""
        known = self._parts.get(id(wrapped))
        if known is None:
            known = self._parts[id(wrapped)] = (wrapped, state_module(wrapped, fqn))
        return known[1]

    def names(self) -> dict[int, str]:
        """By id(), the name of each parameter of each module; for a tied parameter, its first name."""
        if self._names is None:
            self._names = {}
            for name, key, tensor, part in self._tensors():
                self._names.setdefault(id(tensor), name)
                self._note(key, tensor, part)
        return self._names

    def shards(self) -> dict[int, list[FlatShard]]:
        """The FlatShards of parameters in FullyShardedDataParallel (`fsdp1.Shards`)."""
        self.names()
        return self._shards

    def all_names(self) -> dict[str, Any]:
        """Every parameter by each of its names."""
        return {name: tensor for name, _, tensor, _ in self._tensors()}

    def group(self, parameter: Any) -> ReplicaGroup | None:
        """The replicas of plain tensors in the optimizer state of `parameter`; None if each rank has its own."""
        self.names()
        if not is_dtensor(parameter):
            return self._groups.get(id(parameter))
        group, outer = mesh_group(parameter), self.beyond(parameter)
        return group if group is None or outer is None else outer.times(group)

    def explains(self, parameter: Any) -> bool:
        """Whether a module of the state contains `parameter`; only then are its replicas known."""
        return id(parameter) in self.names()

    def beyond(self, parameter: Any) -> ReplicaGroup | None:
        """The ranks outside the mesh of a sharded parameter that hold replicas of it and of its state."""
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
