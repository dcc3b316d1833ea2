"""The walk over the user's state: every tensor gets an FQN, everything else becomes a node of the state tree."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from checkpointd.arguments import shown
from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture import objects, optimizer_layout, optimizers
from checkpointd_client.capture.modules import Modules
from checkpointd_client.capture.plain import classes
from checkpointd_client.capture.plain.containers import NAMESPACES
from checkpointd_client.capture.scalars import encode, is_scalar, key_node, key_text, refused, type_name
from checkpointd_client.capture.state_dicts import HandedOut
from checkpointd_client.capture.tensor_kinds import contexts, sharded
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses, kind_of_torch
from checkpointd_client.capture.tensor_kinds.kind import OuterFacts, TensorKind
from checkpointd_client.capture.tensor_kinds.low_bit import is_low_bit
from checkpointd_client.capture.tensors import array_tensor, refusal, stride_of, stride_of_whole
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import (
    ALONE,
    FlatShard,
    LocalShard,
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
"""The most containers inside one another: the decoder of the tree must be able to read every tree."""

CLIENT_STATE = "client_state"
"""The reserved first part of the FQNs of client_state."""

DictKind = Literal["dict", "OrderedDict", "Counter"]
SequenceKind = Literal["list", "tuple", "set", "frozenset", "Size"]

# A defaultdict loads as a dict, because its factory is code.
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


class Flattener:
    """One walk. `tensors[i]` belongs to `fqns[i]`, in the order of the state. `optimizer_only`: positions of tensors in an
    optimizer's own state. `optimizers`: all optimizers of the state. `excluded`: FQNs of frozen parameters that were left out.

    `held`: by position, the local shard of a distributed tensor; `tensors` has its local memory. `sharded`: by position, the
    DTensor or FlatShard itself. `tied`: by position of a LocalShardTensor that the walk has met before, its first position.
    `begins`: the position at which each item of the state begins, then the one at which client_state begins. `outer`: by
    position of an inner tensor, the composite tensor around it, with its FQN. `has_foreign`: there are values that an
    integration will put back itself. `modules`: those of the state.
    """

    def __init__(self, *, exclude_frozen_parameters: bool, classes: TensorClasses = ONLY_BUILT_IN) -> None:
        self.fqns: list[str] = []
        self.tensors: list[torch.Tensor] = []
        self.held: dict[int, LocalShard] = {}
        self.sharded: dict[int, Any] = {}
        self.tied: dict[int, int] = {}
        self.begins: list[int] = []
        self.outer: dict[int, tuple[str, Any]] = {}
        self.has_foreign = False
        self._classes = classes
        self._met: dict[int, int] = {}
        self.optimizer_only: set[int] = set()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.excluded: list[str] = []
        self._exclude = exclude_frozen_parameters
        self._objects_allowed = True
        self._path: set[int] = set()
        self.modules = Modules({})
        self._loose = Loose()
        self._explained = False
        self._in_module = False
        self._owners: Mapping[int, Any] = {}
        self._low_bit: torch.optim.Optimizer | None = None

    def root(self, state: Mapping[str, object], client_state: Mapping[str, object] | None) -> tree.Node:
        """The tree of both; StateError for a value that cannot be stored."""
        self.check_names(state)
        self.modules = Modules(state)
        stored: list[tuple[tree.Node, tree.Node]] = []
        for name, value in state.items():
            self.begins.append(len(self.tensors))
            stored += self._pairs([(name, value)], "")
        self.begins.append(len(self.tensors))
        client = self.client_node(client_state)
        self._loose.settle(self.held, self.sharded.values())
        return tree.Dict("dict", (("state", tree.Dict("dict", tuple(stored))), (CLIENT_STATE, client)))

    def client_node(self, client_state: Mapping[str, object] | None) -> tree.Node:
        """The node for client_state; no other object of the state may be walked after it."""
        self._objects_allowed = False
        return None if client_state is None else self._plain_mapping(client_state)

    @staticmethod
    def check_names(state: object) -> None:
        """StateError if `state` does not map names to objects."""
        if not isinstance(state, Mapping):
            raise StateError(f"the state must map names to objects, not be a {type_name(state)}: pass {{'model': model, ...}}")
        for name in state:
            if type(name) is not str:
                raise StateError(f"the state's names must be str, not {type_name(name)} ({shown(name)})")
        if CLIENT_STATE in state:
            raise StateError(f"the name {CLIENT_STATE!r} in the state is reserved: pass client_state=... instead")

    def _plain_mapping(self, client_state: Mapping[str, object]) -> tree.Node:
        if not isinstance(client_state, Mapping):
            raise StateError(f"client_state must be a dict, not a {type_name(client_state)}")
        return tree.Dict("dict", self._pairs(client_state.items(), CLIENT_STATE))

    def node(self, value: object, fqn: str) -> tree.Node:
        """The node for any value at `fqn`; notes the tensors in it."""
        return _HANDLERS.get(type(value), Flattener._other)(self, value, fqn)

    def _tensor(self, value: torch.Tensor, fqn: str) -> tree.Node:
        if value.layout is not torch.strided or value.is_nested or value.is_quantized:
            kind = kind_of_torch(value)
            if kind is not None:
                return self._composite(value, kind, fqn)
        return self._noted(value, fqn, trained=value.requires_grad, stride=stride_of(value))

    def _composite(self, value: torch.Tensor, kind: TensorKind, fqn: str) -> tree.Node:
        self._enter(value, fqn)
        try:
            apart = kind.apart(value)
        except (ValueError, RuntimeError) as error:
            raise StateError(f"{fqn}: this {type_name(value)} cannot be stored: {error}") from error
        context = contexts.encode(apart.context, fqn, self._classes.allows)
        first, facts = len(self.tensors), OuterFacts.of(value)
        inner = tuple((name, self.node(one, f"{fqn}.{name}")) for name, one in apart.inner.items())
        self.outer.update(dict.fromkeys(range(first, len(self.tensors)), (fqn, value)))
        self._path.discard(id(value))
        dtype = str(facts.dtype).removeprefix("torch.")
        return tree.Composite(kind.name, facts.shape, dtype, inner, context, facts.requires_grad)

    def _noted(self, memory: torch.Tensor, fqn: str, *, trained: bool, stride: tuple[int, ...] | None = None) -> tree.Tensor:
        self.fqns.append(fqn)
        self.tensors.append(memory)
        return tree.Tensor(fqn, trained, "cpu" if memory.is_cpu else memory.device.type, stride=stride)

    def _sharded(self, value: Any, fqn: str) -> tree.Node:
        if is_dtensor(value):
            parts = sharded.parts_of(value, fqn, self._classes, self._low_bit, self._owners.get(id(value)))
            if isinstance(parts, sharded.OwnPart):
                return self._own_part(value, parts, fqn)
            if parts is not None:
                return self._sharded_composite(value, parts, fqn)
        position, local = len(self.tensors), local_of(value)
        self.held[position], self.sharded[position] = held_by(value, fqn), value
        if not self._explained and type(value) is not FlatShard:
            self._loose.note(position, value)
        stride = stride_of_whole(local, tuple(value.shape))
        node = self._noted(local, fqn, trained=value.requires_grad, stride=stride)
        owner = self._owners.get(id(value))
        has_own_layout = owner is not None and owner.shape != value.shape and is_dtensor(value)
        return optimizer_layout.noted(node, value) if has_own_layout else node

    def _sharded_composite(self, value: Any, parts: Sequence[sharded.Part], fqn: str) -> tree.Node:
        first, nodes = len(self.tensors), list[tree.Node]()
        for part in parts:
            inner: list[tuple[str, tree.Node]] = []
            for name, (memory, held) in part.inner.items():
                position = len(self.tensors)
                self.held[position], self.sharded[position] = held, value
                if not self._explained:
                    self._loose.note(position, value)
                below = ".".join(one for one in (fqn, part.name, name) if one)
                inner.append((name, self._noted(memory, below, trained=False)))
            context = contexts.encode(part.context, fqn, self._classes.allows)
            nodes.append(part.node(tuple(inner), context))
        self.outer.update(dict.fromkeys(range(first, len(self.tensors)), (fqn, value)))
        return sharded.joined(parts, nodes, value)

    def _own_part(self, value: Any, part: sharded.OwnPart, fqn: str) -> tree.Node:
        first = len(self.tensors)
        inner = ((sharded.LOCAL, self._composite(part.local, part.kind, f"{fqn}.{sharded.LOCAL}")),)
        self.outer.update(dict.fromkeys(range(first, len(self.tensors)), (fqn, value)))
        dtype = str(value.dtype).removeprefix("torch.")
        boxes = contexts.encode(part.boxes, fqn, self._classes.allows)
        return tree.Composite(sharded.OWN_PART, tuple(value.shape), dtype, inner, boxes, value.requires_grad)

    def _held_tensor(self, value: LocalShardTensor, fqn: str) -> tree.Node:
        position = len(self.tensors)
        first = self._met.setdefault(id(value), position)
        if first != position:
            self.tied[position] = first
        self.has_foreign = True
        if value.optimizer_only:
            self.optimizer_only.add(position)
        self.held[position] = value.held
        return self._noted(value.tensor, fqn, trained=value.trained)

    def _handed_out(self, value: HandedOut, fqn: str) -> tree.Node:
        self.has_foreign = True
        return self.node(value.content, fqn)

    def _array(self, value: NDArray[np.generic], fqn: str) -> tree.Node:
        tensor = array_tensor(value, fqn)
        self.fqns.append(fqn)
        self.tensors.append(tensor)
        return tree.Array(fqn, value.dtype.str, stride=stride_of(tensor))

    def _dict(self, value: dict[object, object], fqn: str) -> tree.Node:
        self._enter(value, fqn)
        node = tree.Dict(DICT_KINDS[type(value)], self._pairs(value.items(), fqn), self._attributes(value, fqn))
        self._path.discard(id(value))
        return node

    def _attributes(self, value: object, fqn: str) -> tree.Dict | None:
        """The attributes of a dict, such as torch's `_metadata`; None if it has none."""
        found = vars(value) if type(value) in objects.ATTRIBUTED else {}
        return tree.Dict("dict", self._pairs(found.items(), fqn)) if found else None

    def _namespace(self, value: Any, fqn: str) -> tree.Node:
        if objects.is_object(value):  # it has functions state_dict and load_state_dict
            return self._other(value, fqn)
        self._enter(value, fqn)
        node = tree.Dict(NAMESPACES[type(value)], self._pairs(vars(value).items(), fqn))
        self._path.discard(id(value))
        return node

    def _sequence(self, value: Iterable[object], fqn: str) -> tree.Node:
        self._enter(value, fqn)
        nodes: list[tree.Node] = []
        for i, child in enumerate(value):  # no comprehension and no helper: each level should take little of Python's stack
            nodes.append(_HANDLERS.get(type(child), Flattener._other)(self, child, f"{fqn}.{i}"))
        self._path.discard(id(value))
        kind = SEQUENCE_KINDS.get(type(value))
        return self._named_or_deque(value, tuple(nodes), fqn) if kind is None else tree.Sequence(kind, tuple(nodes))

    @staticmethod
    def _named_or_deque(value: Any, nodes: tuple[tree.Node, ...], fqn: str) -> tree.Node:
        if type(value) is collections.deque:
            return tree.Deque("deque", nodes, value.maxlen)
        if getattr(value, "__dict__", None):
            raise StateError(
                f"{fqn}: a {type_name(value)} has attributes beside its fields ({', '.join(vars(value))}), which would be "
                "lost: store a dict of both"
            )
        return tree.NamedTuple("namedtuple", nodes, *classes.named(type(value), fqn), type(value)._fields)

    def _enter(self, value: object, fqn: str) -> None:
        """Refuse a container that contains itself, or is nested too deeply."""
        if id(value) in self._path:
            raise StateError(f"{fqn}: this {type_name(value)} contains itself: a cycle cannot be stored")
        if len(self._path) >= DEPTH_MAX:
            raise StateError(f"{fqn:.200}: nested deeper than {DEPTH_MAX} containers: flatten it, or store it as bytes")
        self._path.add(id(value))

    def _pairs(self, pairs: Iterable[tuple[Any, object]], fqn: str) -> tuple[tuple[tree.Node, tree.Node], ...]:
        prefix = f"{fqn}." if fqn else ""
        items: list[tuple[tree.Node, tree.Node]] = []
        for key, child in pairs:
            # The fast path for nearly all keys: this runs for every tensor of every save.
            plain = type(key) is str and key.isascii()
            path = prefix + (key if plain else key_text(key))
            node = _HANDLERS.get(type(child), Flattener._other)(self, child, path)
            items.append((key if plain else key_node(key, fqn), node))
        return tuple(items)

    def _other(self, value: Any, fqn: str) -> tree.Node:
        if is_scalar(value):
            return encode(value, fqn)
        if is_dtensor(value):
            _HANDLERS[type(value)] = Flattener._sharded  # the next value of this type comes there directly
            return self._sharded(value, fqn)
        if isinstance(value, torch.Tensor):
            kind = self._classes.kind_of(value)
            if kind is not None:
                return self._composite(value, kind, fqn)
            if not (self._in_module and self._classes.is_plain_parameter(value)):
                raise StateError(f"{fqn}: {refusal(value, in_module=self._in_module)}")
            return self._tensor(value, fqn)
        if not objects.is_object(value):
            if classes.is_namedtuple(value):
                return self._sequence(value, fqn)
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
        part = self.modules.part(wrapped, fqn)
        tensors = part.tensors
        left_out = objects.frozen_names(part.module, tensors) if self._exclude else ()
        self.excluded.extend(f"{fqn}.{part.name(key)}" for key in tensors if key in left_out)
        first = len(self.tensors)
        around, self._explained, self._in_module = self._explained, True, True
        # Pairs, not a dict: if two keys get the same clean name, the state must be refused.
        kept = [(part.name(key), one) for key, one in tensors.items() if key not in left_out]
        attributes = tree.Dict("dict", self._pairs(part.attributes.items(), fqn)) if part.attributes else None
        node = tree.Dict("OrderedDict", self._pairs(kept, fqn), attributes)
        self._explained, self._in_module = around, False
        for i in [i for i in self.sharded if i >= first] if part.beyond else ():
            outer = part.beyond.get(self.sharded[i]._spec.mesh) if is_dtensor(self.sharded[i]) else None
            if outer is not None:
                self.held[i] = spread(self.held[i], outer)
        if part.replicas:
            keys = {f"{fqn}.{part.name(key)}": key for key in tensors}
            for i in range(first, len(self.fqns)):
                key = keys.get(self._outermost(i)[0])
                held = None if key is None else part.held(key, tuple(self.tensors[i].shape))
                if held is not None:
                    self.held[i] = held
        return node

    def _outermost(self, position: int) -> tuple[str, Any]:
        """The tensor of the user's that the one at `position` is, or is a part of, with its FQN."""
        alone = self.fqns[position], self.sharded.get(position, self.tensors[position])
        return self.outer.get(position, alone)

    def _optimizer(self, optimizer: torch.optim.Optimizer, fqn: str) -> tree.Node:
        self.optimizers.append(optimizer)
        names, shards = self.modules.names(), self.modules.shards()
        stored = optimizers.state_dict(optimizer, fqn, shards)
        first = len(self.tensors)
        numbers = optimizers.numbered(optimizer, stored, shards)
        own: Mapping[int, Any] = {}
        if isinstance(stored, dict):
            has_flat = numbers is not None and fsdp1.has_flat(optimizer, shards)
            own = optimizers.owners_of(stored["state"], numbers or {}) if has_flat else optimizers.owners(optimizer)
        around, self._explained, self._owners = self._explained, True, own
        self._low_bit = optimizer if is_low_bit(optimizer) else None
        node = self.node(optimizers.named(stored, numbers, names) or stored, fqn)
        self._explained, self._owners, self._low_bit = around, {}, None
        self._note_own(optimizer, own, first)
        return node

    def _note_own(self, optimizer: torch.optim.Optimizer, own: Mapping[int, Any], first: int) -> None:
        """Note which tensors, from position `first` on, the optimizer itself keeps. A state_dict hook may have added others."""
        for i in range(first, len(self.tensors)):
            parameter = own.get(id(self._outermost(i)[1]))
            if parameter is None:
                continue
            self.optimizer_only.add(i)
            if optimizers.is_partitioned(optimizer):
                self.held[i] = replicated(tuple(self.tensors[i].shape), ALONE)
            else:
                self._note_shared(i, parameter)

    def _note_shared(self, i: int, parameter: Any) -> None:
        """Note the replicas of the optimizer state at position `i`: the ranks that hold `parameter` hold its state, too."""
        if is_dtensor(parameter) and not self.modules.explains(parameter):
            if i in self.sharded:
                self._loose.note(i, self.sharded[i])
            elif self.tensors[i].numel() == 1:
                self._loose.note_beside(i, parameter, self.tensors[i].shape)
            return
        if i in self.sharded:
            outer = self.modules.beyond(parameter)
            if outer is not None:
                self.held[i] = spread(self.held[i], outer)
            return
        tensor, group = self.tensors[i], self.modules.group(parameter)
        # Plain state of a sharded parameter may describe this rank's part alone, unless it has one element.
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
    **dict.fromkeys((*SEQUENCE_KINDS, collections.deque), Flattener._sequence),
    **dict.fromkeys(NAMESPACES, Flattener._namespace),
}
