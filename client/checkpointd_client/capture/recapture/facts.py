"""Facts about the modules, optimizers and tensors of a state. Equal facts mean that a capture finds the same as before.

Invariants
  FACTS-1  Facts hold no tensor, storage, module, optimizer or dict of the user, so the user can free them between two saves.
  FACTS-2  If the facts of two states are equal, a capture finds the same in both, except for the tensors themselves. If this
      is not known of an object, its facts raise Unfit.
  FACTS-3  No Python code runs for a single module or tensor. It runs for each level of a module and for each param group.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import attrgetter, contains, eq, is_, is_not, itemgetter, methodcaller
from typing import Any

import torch
from torch import nn

from checkpointd_client.capture.tensor_kinds.classes import kind_of_torch
from checkpointd_client.capture.tensors import PLAIN_TENSORS
from checkpointd_client.sharding import fsdp1, wrappers
from checkpointd_client.sharding.dtensor import group_of, is_dtensor

SCALARS: frozenset[type] = frozenset({type(None), bool, int, float, str})
"""Values beside tensors in an optimizer's state that can be compared by their repr()."""

_LEVELS_MAX = 200
_DICTS: frozenset[type] = frozenset({dict, OrderedDict})
_VALUES = methodcaller("values")
_OF_MODULES: dict[str, object] = {
    name: getattr(nn.Module, name) for name in ("state_dict", "_save_to_state_dict", "get_extra_state", "named_modules")
}
_OF_OPTIMIZERS = torch.optim.Optimizer.state_dict
_HARMLESS_HOOKS = frozenset(
    {
        # This hook does nothing while the module's parameters are the sharded ones. Other parameters would be other facts.
        (
            "torch.distributed.fsdp._fully_shard._fsdp_param_group",
            "FSDPParamGroup._register_state_dict_hooks.<locals>.to_sharded_hook",
        ),
        # This hook only takes a wrapper's name out of the keys.
        ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper._post_state_dict_hook"),
    }
)


class Unfit(Exception):
    """Facts do not tell what a capture would find."""


@dataclass(frozen=True, slots=True)
class Found:
    """The `facts` of a module or an optimizer, and its live `values`. The facts determine the order of the values."""

    facts: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)


# --- modules ----------------------------------------------------------------------------------------------------------


def of_module(wrapped: nn.Module) -> Found:
    """A module, with its wrappers. The values are its parameters and buffers, also those that are None or not persistent."""
    found, kinds = Found(), set[type]()
    level = [_unwrapped(wrapped, found)]
    for _ in range(_LEVELS_MAX):
        if not level:
            break
        kinds.update(map(type, level))
        level = _look_at(level, found)
    if level or not all(map(_is_plain, kinds)):
        raise Unfit
    return found


def _unwrapped(module: Any, found: Found) -> nn.Module:
    while (inner := wrappers.inner_name(module)) is not None:
        found.facts.append(inner)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            if getattr(module, "device_mesh", None) is not None:
                raise Unfit
            found.facts.append(
                (group_of(module.process_group), bool(module.broadcast_buffers), frozenset(module.parameters_to_ignore))
            )
        module = getattr(module, inner)
    unwrapped: nn.Module = module
    return unwrapped


@dataclass(frozen=True, slots=True)
class _Level:
    """The facts of all modules at one depth, by module in lists of `counts`, by member in lists of keys."""

    counts: tuple[list[int], list[int], list[int]]
    parameters: list[str]
    buffers: list[str]
    not_persistent: list[frozenset[str]]
    """By module; empty if every buffer is persistent."""
    children: list[str]
    are_there: list[bool]
    """By child, whether it is not None."""
    are_wrappers: list[bool]
    """By module, whether it is a wrapper, which adds to the names of its tensors."""
    versions: list[object]
    """By module, its `_version`, which state_dict() notes."""
    hooks: list[int]
    """By module, the number of its hooks; empty if there are none."""

    def persistent(self) -> Iterator[bool]:
        """By value, parameters first, whether a state_dict has it."""
        yield from repeat(True, len(self.parameters))
        names = iter(self.buffers)
        for count, left_out in zip(self.counts[1], self.not_persistent or repeat(frozenset[str]()), strict=False):
            yield from (next(names) not in left_out for _ in range(count))


def _look_at(level: list[nn.Module], found: Found) -> list[nn.Module]:
    """Note the modules of one level, and return their children."""
    inside = list(map(vars, level))
    if any(any(map(contains, inside, repeat(name))) for name in _OF_MODULES):
        raise Unfit
    parameters, buffers, children = (_each(inside, name) for name in ("_parameters", "_buffers", "_modules"))
    if not _DICTS.issuperset(map(type, chain(parameters, buffers, children))):
        raise Unfit
    not_persistent, after = _each(inside, "_non_persistent_buffers_set"), _each(inside, "_state_dict_hooks")
    before = _each(inside, "_state_dict_pre_hooks")
    has_hooks = any(after) or any(before)
    if has_hooks:
        hooks = chain.from_iterable(map(_VALUES, chain(after, before)))
        if not _HARMLESS_HOOKS.issuperset(map(attrgetter("__module__", "__qualname__"), hooks)):
            raise Unfit
    found.values.extend(chain.from_iterable(map(_VALUES, parameters)))
    found.values.extend(chain.from_iterable(map(_VALUES, buffers)))
    inner = list(chain.from_iterable(map(_VALUES, children)))
    are_there = list(map(is_not, inner, repeat(None)))
    kinds = list(map(type, level))
    wrapping = frozenset(kind for kind in set(kinds) if issubclass(kind, wrappers.classes()))  # isinstance() of an ABC is slow
    noted = _Level(
        (list(map(len, parameters)), list(map(len, buffers)), list(map(len, children))),
        list(chain.from_iterable(parameters)),
        list(chain.from_iterable(buffers)),
        list(map(frozenset, not_persistent)) if any(not_persistent) else [],
        list(chain.from_iterable(children)),
        are_there,
        list(map(wrapping.__contains__, kinds)),
        list(map(attrgetter("_version"), level)),
        list(map(len, chain(after, before))) if has_hooks else [],
    )
    found.facts.append(noted)
    return list(compress(inner, are_there))


def _each(inside: list[dict[str, Any]], name: str) -> list[Any]:
    return list(map(itemgetter(name), inside))


def _is_plain(kind: Any) -> bool:
    """Whether modules of this class give their parameters and buffers to state_dict() as nn.Module does."""
    flat = fsdp1.wrapper_class()
    apart = (nn.parallel.DistributedDataParallel, nn.DataParallel, *(() if flat is None else (flat,)))
    return (
        all(getattr(kind, name) is function for name, function in _OF_MODULES.items())
        and kind.__getattribute__ is object.__getattribute__
        and not issubclass(kind, apart)
        and not any(hasattr(kind, name) for name in ("_parameters", "_buffers", "_modules"))
    )


def persistent(found: Found) -> list[bool]:
    """By value of a module, whether a state_dict has it, if it is not None."""
    return list(chain.from_iterable(level.persistent() for level in found.facts if isinstance(level, _Level)))


# --- optimizers -------------------------------------------------------------------------------------------------------


def of_optimizer(optimizer: torch.optim.Optimizer) -> Found:
    """An optimizer, except for what its param_groups hold beside parameters. The values are the parameters of its groups,
    the parameters that have state, and the values of that state.
    """
    kind: Any = type(optimizer)
    hooks = optimizer._optimizer_state_dict_pre_hooks or optimizer._optimizer_state_dict_post_hooks
    own = kind.state_dict is not _OF_OPTIMIZERS or "state_dict" in vars(optimizer)
    if own or hooks or kind.__getattribute__ is not object.__getattribute__:
        raise Unfit
    groups, state = optimizer.param_groups, optimizer.state
    entries = list(state.values())
    parameters = [group["params"] for group in groups]
    keys = list(chain.from_iterable(entries))
    fits = (
        type(groups) is list
        and type(state) in (dict, defaultdict)
        and {dict}.issuperset(map(type, chain(groups, entries)))
        and {list}.issuperset(map(type, parameters))
        and {str}.issuperset(map(type, keys))
    )
    if not fits:
        raise Unfit
    return Found(
        [list(map(len, parameters)), len(state), list(map(len, entries)), keys],
        [*chain.from_iterable(parameters), *state, *chain.from_iterable(map(_VALUES, entries))],
    )


def parameters(found: Found) -> list[Any]:
    """The parameters of an optimizer, and those that have state."""
    return found.values[: sum(found.facts[0]) + found.facts[1]]


def state_values(found: Found) -> list[Any]:
    """The values of an optimizer's state."""
    return found.values[sum(found.facts[0]) + found.facts[1] :]


# --- values -----------------------------------------------------------------------------------------------------------

_OF_SHARDED: tuple[Callable[[Any], Any], ...] = (type, torch.Tensor.size, attrgetter("requires_grad"))
_LOCAL, _SPEC, _MESH = attrgetter("_local_tensor"), attrgetter("_spec"), attrgetter("_spec.mesh")
_Results = list[tuple[Callable[[Any], Any], list[Any]]]
"""Functions of tensors, each with its results."""


class ValueFacts:
    """The facts of live values: which of them are the same object, and what each tensor among them is like.

    The specs of DTensors and their meshes are kept, so that no other object gets their place in memory.
    """

    def __init__(self, values: Sequence[Any], noted: Sequence[bool], in_modules: Sequence[bool]) -> None:
        """`noted`: by value, whether a capture looks at it. `in_modules`: whether it lies in a module. Unfit for a value of an
        unknown kind, and for tensors whose elements must be computed at each capture.
        """
        positions = list(compress(range(len(values)), noted))
        if not all(_is_known(values[i], in_module=in_modules[i]) for i in positions):
            raise Unfit
        unique = sorted({id(values[i]): i for i in reversed(positions)}.values())
        plain = [i for i in unique if type(values[i]) in PLAIN_TENSORS]
        sharded = [i for i in unique if is_dtensor(values[i])]
        self.place = {id(values[i]): k for k, i in enumerate([*plain, *sharded])}
        """By the id() of each tensor, its place in `memory()`."""
        others = [i for i in positions if in_modules[i] and type(values[i]) is not nn.Parameter and values[i] is not None]
        self._noted, self._plain, self._sharded, self._others = map(picker, (positions, plain, sharded, others))
        self._scalars = picker([i for i in positions if type(values[i]) in SCALARS])
        memory, dtensors = self._memory(values), self._sharded(values)
        self._empty = picker([k for k in range(len(plain), len(memory)) if not memory[k].numel()])
        are_lazy = any(tensor.is_neg() or (tensor.is_complex() and tensor.is_conj()) for tensor in memory)
        if are_lazy:
            raise Unfit
        self._ids = list(map(id, self._noted(values)))
        self._guards = _guards(memory)
        self._addresses = list(map(torch.Tensor.data_ptr, memory))
        self._of_sharded: _Results = [(of, list(map(_untracked, map(of, dtensors)))) for of in _OF_SHARDED]
        self._specs, self._meshes = list(map(_SPEC, dtensors)), list(map(_MESH, dtensors))
        self._rest = self._rest_of(values, memory)

    def memory(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        """The memory of each tensor among `values`, once. Unfit if one of the facts has changed."""
        if list(map(id, self._noted(values))) != self._ids:
            raise Unfit
        memory, dtensors = self._memory(values), self._sharded(values)
        same = (
            _are(self._of_sharded, dtensors)
            and all(map(is_, map(_MESH, dtensors), self._meshes))
            and list(map(_SPEC, dtensors)) == self._specs
            and list(map(torch.Tensor.data_ptr, memory)) == self._addresses
            and _are_as_guarded(self._guards, memory)
            and self._rest_of(values, memory) == self._rest
        )
        if not same:
            raise Unfit
        return memory

    def _memory(self, values: Sequence[Any]) -> Sequence[torch.Tensor]:
        return [*self._plain(values), *map(_LOCAL, self._sharded(values))]

    def _rest_of(self, values: Sequence[Any], memory: Sequence[torch.Tensor]) -> tuple[list[Any], ...]:
        """The scalars, which other tensors count as parameters, and the storages of local tensors without elements."""
        scalars = self._scalars(values)
        return (
            list(map(type, scalars)),
            list(map(repr, scalars)),
            list(map(bool, map(getattr, self._others(values), repeat("_is_param"), repeat(False)))),
            list(map(attrgetter("_cdata"), map(torch.Tensor.untyped_storage, self._empty(memory)))),
        )


def _is_known(value: Any, *, in_module: bool) -> bool:
    if value is None if in_module else type(value) in SCALARS:
        return True
    memory = _LOCAL(value) if is_dtensor(value) else value
    # torch's guards end the process if they meet a sparse or a nested tensor.
    return type(memory) in PLAIN_TENSORS and kind_of_torch(memory) is None


def _guards(tensors: Sequence[torch.Tensor]) -> Any:
    """What torch's compiler checks before it uses compiled code again. Unfit if this torch has no such check.

    For each tensor, in C++: its type, dtype, device, layout, sizes, strides, requires_grad, and whether it is an inference
    tensor, a conjugate or a negative view. All but the type and the numbers are in its dispatch keys.
    """
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
    if guards is None:
        raise Unfit
    with _plain_keys():
        return guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)


def _are_as_guarded(guards: Any, tensors: Sequence[torch.Tensor]) -> bool:
    with _plain_keys():
        same: bool = guards.check(*tensors)
        return same


@contextmanager
def _plain_keys() -> Iterator[None]:
    """Without modes that add or hide dispatch keys, so that the keys are those of the tensors alone."""
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableAutocast():
        yield


def _are(facts: _Results, tensors: Sequence[Any]) -> bool:
    # No list is made: torch makes a tuple for each shape, and many at a time would keep Python's garbage collector busy.
    return all(all(map(eq, map(of, tensors), known)) for of, known in facts)


def _untracked(fact: Any) -> Any:
    """A torch.Size as a plain tuple, which Python's garbage collector can leave alone."""
    return tuple(fact) if isinstance(fact, tuple) else fact


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that picks the items at `positions` of a sequence."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: [values[i] for i in positions]
