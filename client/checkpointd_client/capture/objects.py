"""The kinds of objects in a state, and a module's tensors under their clean names."""

from __future__ import annotations

import collections
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.sharding.dtensor import FlatShard

METADATA = "_metadata"
"""The attribute of a module's state_dict() with the versions of its parts, by their paths."""


ATTRIBUTED: tuple[type, ...] = (collections.OrderedDict, collections.Counter)
"""The classes of dicts of a state that may have attributes."""


class Stateful(Protocol):
    """An object with state_dict() and load_state_dict(), such as an LR scheduler, a data loader or a GradScaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether `value` is an object, not a class, with state_dict() and load_state_dict()."""
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def is_object(value: object) -> bool:
    """Whether a load changes `value` in place. Plain values are replaced instead."""
    return isinstance(value, torch.Generator) or is_stateful(value)


def module_tensors(module: nn.Module, fqn: str) -> dict[str, Any]:
    """The unwrapped module's `state_dict`, with the live parameters (not detached) and under the module's own keys."""
    # An override may take no arguments. The detached tensors that it returns share the memory of the parameters, too.
    keeps = type(module).state_dict is nn.Module.state_dict or takes(module.state_dict, "keep_vars")
    found = state_dict_of(module, fqn, keep_vars=True) if keeps else state_dict_of(module, fqn)
    if not isinstance(found, Mapping):
        raise StateError(f"{fqn}: state_dict() of the module {type_name(module)} returned {type_name(found)}, not a dict")
    if isinstance(found, dict):
        return found
    made = collections.OrderedDict(found)
    vars(made).update({METADATA: getattr(found, METADATA)} if hasattr(found, METADATA) else {})
    return made


def attributes_of(found: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a state_dict(). Of a dict of a class of the user's own, only torch's."""
    if type(found) in ATTRIBUTED:
        return dict(vars(found))
    return {METADATA: getattr(found, METADATA)} if hasattr(found, METADATA) else {}


def frozen_names(module: nn.Module, tensors: Mapping[str, object]) -> set[str]:
    """Keys of `tensors` that are parameters of the module with requires_grad off."""
    names = {key for key, value in tensors.items() if isinstance(value, nn.Parameter | FlatShard) and not value.requires_grad}
    if type(module).state_dict is not nn.Module.state_dict:
        frozen = (name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)
        names.update(name for name in frozen if name in tensors)
    return names


def takes(function: object, argument: str) -> bool:
    """Whether `function` can be called with `argument` by keyword."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]  # any callable; what is none raises
    except (TypeError, ValueError):
        return False
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def loading(value: object, fqn: str, load: Callable[[Any], object]) -> Callable[[Any], None]:
    """The object's own `load`, whose errors become a StateError that names the object."""

    def run(state: Any) -> None:
        try:
            load(state)
        except Exception as error:  # the user's code may raise anything, and every rank must hear of it
            raise StateError(
                f"{fqn}: load_state_dict() of {type_name(value)} failed, and the objects are now loaded in part: "
                f"{type(error).__name__}: {error}"
            ) from error

    return run


def state_dict_of(value: Any, fqn: str, **options: bool) -> object:
    """Call the object's state_dict(); its errors become a StateError that names the object."""
    try:
        return value.state_dict(**options)
    except Exception as error:  # the user's code may raise anything
        raise StateError(f"{fqn}: state_dict() of {type_name(value)} failed: {type(error).__name__}: {error}") from error
