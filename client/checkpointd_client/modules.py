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

from checkpointd_client import objects
from checkpointd_client.sharding import Group, Held, beyond, group_of, is_dtensor, mesh_group, replicated


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One module of a state. `tensors`: its state_dict, by its own keys; `renamed`: of those, the ones stored under another."""

    fqn: str
    module: nn.Module
    tensors: dict[str, Any]
    renamed: Mapping[str, str]
    replicas: Replicas | None
    beyond: Mapping[int, Group]
    """By the identity of a mesh: the ranks of the module's whole mesh that hold the same of what lies on that part of it."""

    def name(self, key: str) -> str:
        """What the tensor at `key` is stored under, below the module's FQN."""
        return self.renamed.get(key, key)

    def held(self, key: str) -> Held | None:
        """Whether ranks hold the plain tensor at `key` together, and how; None where it is this rank's own."""
        value = self.tensors[key]
        plain = isinstance(value, torch.Tensor) and not is_dtensor(value)
        return self.replicas.held(key, value) if plain and self.replicas is not None else None


@dataclass(frozen=True, slots=True)
class Replicas:
    """What DistributedDataParallel keeps equal: parameters always, buffers as it broadcasts rank 0's before a forward pass."""

    group: Group
    buffers: bool
    ignored: frozenset[str]

    def held(self, key: str, value: torch.Tensor) -> Held | None:
        if key in self.ignored:
            return None
        if isinstance(value, nn.Parameter):
            return replicated(tuple(value.shape), self.group)
        # Until then each rank has its own: the one that the others will be given is written, and by who has it.
        return replicated(tuple(value.shape), self.group, first_writes=True) if self.buffers else None


def replicas_of(wrapped: nn.Module) -> Replicas | None:
    """What the DistributedDataParallel around a module keeps equal; None where there is none."""
    module: Any = wrapped
    while (inner := objects.inner_name(module)) is not None:
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ignored = frozenset(module.parameters_to_ignore)
            return Replicas(group_of(module.process_group), bool(module.broadcast_buffers), ignored)
        module = getattr(module, inner)
    return None


def part_of(wrapped: nn.Module, fqn: str) -> Part:
    """The module as it is stored."""
    module = objects.unwrap(wrapped)
    tensors = objects.module_tensors(module, fqn)
    meshes = {id(mesh): mesh for value in tensors.values() if is_dtensor(value) for mesh in (value._spec.mesh,)}
    outer = beyond(list(meshes.values())) if len(meshes) > 1 else {}
    return Part(fqn, module, tensors, objects.clean_names(module, tensors), replicas_of(wrapped), outer)


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
    _parts: dict[int, tuple[nn.Module, Part]] = field(default_factory=dict)
    _names: dict[int, str] | None = None
    _groups: dict[int, Group] = field(default_factory=dict)
    _beyond: dict[int, Group] = field(default_factory=dict)

    def part(self, wrapped: nn.Module, fqn: str) -> Part:
        """The module, under the FQN where it is first met."""
        known = self._parts.get(id(wrapped))
        if known is None:
            known = self._parts[id(wrapped)] = (wrapped, part_of(wrapped, fqn))
        return known[1]

    def names(self) -> dict[int, str]:
        """What every parameter of every module is called, by its identity; the first name of one that has several."""
        if self._names is None:
            self._names = {}
            for name, tensor, part in self._tensors():
                self._names.setdefault(id(tensor), name)
                self._note(name.removeprefix(f"{part.fqn}."), tensor, part)
        return self._names

    def all_names(self) -> dict[str, torch.Tensor]:
        """Every parameter by each of its names."""
        return {name: tensor for name, tensor, _ in self._tensors()}

    def group(self, parameter: torch.Tensor) -> Group | None:
        """The ranks that hold the same of what is plain in the state of `parameter`; None where each has its own."""
        self.names()
        if not is_dtensor(parameter):
            return self._groups.get(id(parameter))
        group, outer = mesh_group(parameter), self.beyond(parameter)
        return group if group is None or outer is None else outer.times(group)

    def beyond(self, parameter: torch.Tensor) -> Group | None:
        """The ranks outside the mesh of a sharded parameter that hold the same of it and of its state."""
        self.names()
        return self._beyond.get(id(parameter))

    def _note(self, key: str, tensor: torch.Tensor, part: Part) -> None:
        if is_dtensor(tensor):
            outer = part.beyond.get(id(tensor._spec.mesh))
            if outer is not None:
                self._beyond.setdefault(id(tensor), outer)
        elif part.replicas is not None and key not in part.replicas.ignored:
            self._groups.setdefault(id(tensor), part.replicas.group)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor, Part]]:
        for fqn, wrapped in modules_in(dict(self.state), ""):
            part = self.part(wrapped, fqn)
            for key, value in part.tensors.items():
                if isinstance(value, nn.Parameter):
                    yield f"{part.fqn}.{part.name(key)}", value, part
