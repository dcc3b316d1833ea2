"""The walk over the user's state: every tensor gets an FQN, everything else becomes a node of the state tree."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture import objects, optimizer_layout, optimizers
from checkpointd_client.capture.modules import Modules
from checkpointd_client.capture.scalars import SCALAR_TYPES, encode, key_node, key_text, refused, type_name
from checkpointd_client.capture.state_dicts import HandedOut
from checkpointd_client.capture.tensors import array_tensor, refusal
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import (
    FlatShard,
    LocalShard,
    ReplicaGroup,
    held_by,
    is_dtensor,
    is_sharded,
    local_of,
    replicated,
    spread,
)
from checkpointd_client.sharding.flat_range import LocalShardTensor
from checkpointd_client.sharding.meshes import Loose

DEPTH_MAX = 200
"""Containers inside one another; the decoder of the tree must be able to read what is written."""

CLIENT_STATE = "client_state"
"""The reserved first part of the FQNs of client_state."""

DictKind = Literal["dict", "OrderedDict", "Counter"]
SequenceKind = Literal["list", "tuple", "set", "frozenset", "Size"]

# defaultdict loads as dict: its factory is code.
DICT_KINDS: dict[type, DictKind] = {
    dict: "dict",
    collections.OrderedDict: "OrderedDict",
    collections.defaultdict: "dict",
    collections.Counter: "Counter",
}
SEQUENCE_KINDS: dict[type, SequenceKind] = {
    list: "list",
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    torch.Size: "Size",
}


_ALONE = ReplicaGroup(0, 1)
"""Of what no other rank has."""


class Flattener:
    """One walk. `tensors[i]` belongs to `fqns[i]`, in the order of the state; `optimizer_only` has the positions of what an
    optimizer's own state holds, `optimizers` every optimizer met, `excluded` the FQNs of frozen parameters left out.

    `held`: by position, what this rank holds of a tensor that ranks hold together; `tensors` has the local part of one that is
    sharded, and `sharded` the DTensor itself. `tied`: positions of a HeldTensor that was met before, and where.
    """

    def __init__(self, *, exclude_frozen_parameters: bool) -> None:
        self.fqns: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.held: dict[int, LocalShard] = {}
        self.sharded: dict[int, Any] = {}
        self.tied: dict[int, int] = {}
        self._met: dict[int, int] = {}
        self.optimizer_only: set[int] = set()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.excluded: list[str] = []
        self._exclude = exclude_frozen_parameters
        self._objects_allowed = True
        self._path: set[int] = set()
        self._modules = Modules({})
        self._loose = Loose()
        self._explained = False
        self._owners: Mapping[int, Any] = {}

    def root(self, state: Mapping[str, object], client_state: Mapping[str, object] | None) -> tree.Node:
        """The tree of both; StateError for what cannot be stored."""
        self._check_names(state)
        self._modules = Modules(state)
        stored = self._pairs(state.items(), "")
        self._objects_allowed = False
        client = None if client_state is None else self._plain_mapping(client_state)
        self._loose.settle(self.held, self.sharded.values())
        return tree.Dict("dict", (("state", tree.Dict("dict", stored)), (CLIENT_STATE, client)))

    @staticmethod
    def _check_names(state: object) -> None:
        if not isinstance(state, Mapping):
            raise StateError(f"the state must map names to objects, not be a {type_name(state)}: pass {{'model': model, ...}}")
        for name in state:
            if type(name) is not str:
                raise StateError(f"the state's names must be str, not {type_name(name)} ({name!r:.80})")
        if CLIENT_STATE in state:
            raise StateError(f"the name {CLIENT_STATE!r} in the state is reserved: pass client_state=... instead")

    def _plain_mapping(self, client_state: Mapping[str, object]) -> tree.Node:
        if not isinstance(client_state, Mapping):
            raise StateError(f"client_state must be a dict, not a {type_name(client_state)}")
        return tree.Dict("dict", self._pairs(client_state.items(), CLIENT_STATE))

    def node(self, value: object, fqn: str) -> tree.Node:
        """The node for any value at `fqn`, and the tensors inside it noted."""
        return _HANDLERS.get(type(value), Flattener._other)(self, value, fqn)

    def _tensor(self, value: torch.Tensor, fqn: str) -> tree.Node:
        self.fqns.append(fqn)
        self.tensors.append(value)
        return tree.Tensor(fqn, value.requires_grad, "cpu" if value.is_cpu else value.device.type)

    def _sharded(self, value: Any, fqn: str) -> tree.Node:
        position, local = len(self.tensors), local_of(value)
        self.held[position], self.sharded[position] = held_by(value, fqn), value
        if not self._explained and type(value) is not FlatShard:
            self._loose.note(position, value)
        self.fqns.append(fqn)
        self.tensors.append(local)
        node = tree.Tensor(fqn, value.requires_grad, "cpu" if local.is_cpu else local.device.type)
        owner = self._owners.get(id(value))
        return (
            node
            if owner is None or owner.shape == value.shape or not is_dtensor(value)
            else optimizer_layout.noted(node, value)
        )

    def _held_tensor(self, value: LocalShardTensor, fqn: str) -> tree.Node:
        position, tensor = len(self.tensors), value.tensor
        first = self._met.setdefault(id(value), position)
        if first != position:
            self.tied[position] = first
        if value.optimizer_only:
            self.optimizer_only.add(position)
        self.held[position] = value.held
        self.fqns.append(fqn)
        self.tensors.append(tensor)
        return tree.Tensor(fqn, value.trained, "cpu" if tensor.is_cpu else tensor.device.type)

    def _handed_out(self, value: HandedOut, fqn: str) -> tree.Node:
        return self.node(value.content, fqn)

    def _array(self, value: NDArray[np.generic], fqn: str) -> tree.Node:
        self.fqns.append(fqn)
        self.tensors.append(array_tensor(value, fqn))
        return tree.Array(fqn, value.dtype.str)

    def _dict(self, value: dict[object, object], fqn: str) -> tree.Node:
        self._enter(value, fqn)
        node = tree.Dict(DICT_KINDS[type(value)], self._pairs(value.items(), fqn))
        self._path.discard(id(value))
        return node

    def _sequence(self, value: Iterable[object], fqn: str) -> tree.Node:
        self._enter(value, fqn)
        nodes: list[tree.Node] = []
        for i, child in enumerate(value):  # no comprehension and no call between: a level must cost little of Python's stack
            nodes.append(_HANDLERS.get(type(child), Flattener._other)(self, child, f"{fqn}.{i}"))
        self._path.discard(id(value))
        return tree.Sequence(SEQUENCE_KINDS[type(value)], tuple(nodes))

    def _enter(self, value: object, fqn: str) -> None:
        """Refuse a container that holds itself or lies too deep."""
        if id(value) in self._path:
            raise StateError(f"{fqn}: this {type_name(value)} contains itself: a cycle cannot be stored")
        if len(self._path) >= DEPTH_MAX:
            raise StateError(f"{fqn:.200}: nested deeper than {DEPTH_MAX} containers: flatten it, or store it as bytes")
        self._path.add(id(value))

    def _pairs(self, pairs: Iterable[tuple[Any, object]], fqn: str) -> tuple[tuple[tree.Node, tree.Node], ...]:
        prefix = f"{fqn}." if fqn else ""
        items: list[tuple[tree.Node, tree.Node]] = []
        for key, child in pairs:
            # What nearly all keys and values are is tested here: this runs for every tensor of every save.
            plain = type(key) is str and key.isascii()
            path = prefix + (key if plain else key_text(key))
            node = _HANDLERS.get(type(child), Flattener._other)(self, child, path)
            items.append((key if plain else key_node(key, fqn), node))
        return tuple(items)

    def _other(self, value: Any, fqn: str) -> tree.Node:
        if type(value) in SCALAR_TYPES or isinstance(value, np.generic):
            return encode(value, fqn)
        if is_dtensor(value):
            _HANDLERS[type(value)] = Flattener._sharded  # from now on without the detour
            return self._sharded(value, fqn)
        if isinstance(value, torch.Tensor):
            raise StateError(f"{fqn}: {refusal(value)}")
        if not objects.is_object(value):
            raise refused(value, fqn)
        if not self._objects_allowed:
            raise StateError(f"{fqn}: {type_name(value)} in client_state, which holds plain values: put it into the state")
        self._enter(value, fqn)
        node = self._object(value, fqn)
        self._path.discard(id(value))
        return node

    def _object(self, value: Any, fqn: str) -> tree.Node:
        if isinstance(value, nn.Module):
            return self._module(value, fqn)
        if isinstance(value, torch.Generator):
            return self._tensor(value.get_state(), fqn)
        if isinstance(value, torch.optim.Optimizer):
            return self._optimizer(value, fqn)
        return self.node(objects.state_dict_of(value, fqn), fqn)

    def _module(self, wrapped: nn.Module, fqn: str) -> tree.Node:
        part = self._modules.part(wrapped, fqn)
        tensors, renamed = part.tensors, part.renamed
        left_out = objects.frozen_names(part.module, tensors) if self._exclude else ()
        self.excluded.extend(f"{fqn}.{part.name(key)}" for key in tensors if key in left_out)
        first = len(self.tensors)
        around, self._explained = self._explained, True
        if renamed or left_out:
            # Pairs, not a dict: two keys that are cleaned to the same name must be seen, and refused.
            kept = [(part.name(key), value) for key, value in tensors.items() if key not in left_out]
            node = tree.Dict("OrderedDict", self._pairs(kept, fqn))
        else:
            node = tree.Dict("OrderedDict", self._pairs(tensors.items(), fqn))
        self._explained = around
        for i in [i for i in self.sharded if i >= first] if part.beyond else ():
            outer = part.beyond.get(self.sharded[i]._spec.mesh) if is_dtensor(self.sharded[i]) else None
            if outer is not None:
                self.held[i] = spread(self.held[i], outer)
        if part.replicas:
            held = {f"{fqn}.{part.name(key)}": one for key in tensors if (one := part.held(key)) is not None}
            self.held.update((i, held[name]) for i in range(first, len(self.fqns)) if (name := self.fqns[i]) in held)
        return node

    def _optimizer(self, optimizer: torch.optim.Optimizer, fqn: str) -> tree.Node:
        self.optimizers.append(optimizer)
        names, shards = self._modules.names(), self._modules.shards()
        stored = optimizers.state_dict(optimizer, fqn, shards)
        first = len(self.tensors)
        numbers = optimizers.numbered(optimizer, stored, shards)
        own: Mapping[int, Any] = {}
        if isinstance(stored, dict):
            has_flat = numbers is not None and fsdp1.has_flat(optimizer, shards)
            own = optimizers.owners_of(stored["state"], numbers or {}) if has_flat else optimizers.owners(optimizer)
        around, self._explained, self._owners = self._explained, True, own
        node = self.node(optimizers.named(stored, numbers, names) or stored, fqn)
        self._explained, self._owners = around, {}
        self._note_own(optimizer, own, first)
        return node

    def _note_own(self, optimizer: torch.optim.Optimizer, own: Mapping[int, Any], first: int) -> None:
        """Of the tensors from `first` on, those that the optimizer itself keeps (a state_dict hook may have added others)."""
        for i in range(first, len(self.tensors)):
            parameter = own.get(id(self.sharded.get(i, self.tensors[i])))
            if parameter is None:
                continue
            self.optimizer_only.add(i)
            if optimizers.is_partitioned(optimizer):
                self.held[i] = replicated(tuple(self.tensors[i].shape), _ALONE)
            else:
                self._note_shared(i, parameter)

    def _note_shared(self, i: int, parameter: Any) -> None:
        """Where ranks hold a parameter together, they hold its state together."""
        if is_dtensor(parameter) and not self._modules.explains(parameter):
            if i in self.sharded:
                self._loose.note(i, self.sharded[i])
            elif self.tensors[i].numel() == 1:
                self._loose.note_beside(i, parameter, self.tensors[i].shape)
            return
        if i in self.sharded:
            outer = self._modules.beyond(parameter)
            if outer is not None:
                self.held[i] = spread(self.held[i], outer)
            return
        tensor, group = self.tensors[i], self._modules.group(parameter)
        # Beside a sharded parameter, what has more than one element may be of this rank's part of it.
        if group is not None and (not is_sharded(parameter) or tensor.numel() == 1):
            self.held[i] = replicated(tuple(tensor.shape), group)


_HANDLERS: dict[type, Callable[[Flattener, Any, str], tree.Node]] = {
    torch.Tensor: Flattener._tensor,
    nn.Parameter: Flattener._tensor,
    FlatShard: Flattener._sharded,
    LocalShardTensor: Flattener._held_tensor,
    HandedOut: Flattener._handed_out,
    np.ndarray: Flattener._array,
    **dict.fromkeys(DICT_KINDS, Flattener._dict),
    **dict.fromkeys(SEQUENCE_KINDS, Flattener._sequence),
}
