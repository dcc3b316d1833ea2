"""The objects that a training script hands over: which kind each is, and a module's tensors under their clean names."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd_client.capture.scalars import type_name
from checkpointd_client.sharding.dtensor import FlatShard


class Stateful(Protocol):
    """Anything that hands out its state and takes it back: LR schedulers, data loaders, GradScaler."""

    def state_dict(self) -> Any: ...  # the protocol's name says it

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether `value` is an object (no class) with state_dict() and load_state_dict()."""
    names = ("state_dict", "load_state_dict")
    return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in names)


def is_object(value: object) -> bool:
    """Whether `value` is kept and told to load, where plain values are replaced."""
    return isinstance(value, torch.Generator) or is_stateful(value)


def unwrap(module: nn.Module) -> nn.Module:
    """The user's own module inside DistributedDataParallel, DataParallel and what torch.compile returns, in any order."""
    while True:
        inner = inner_name(module)
        if inner is None:
            return module
        module = getattr(module, inner)


def inner_name(module: nn.Module) -> str | None:
    """The attribute under which a wrapper keeps the user's module; None where `module` is no wrapper."""
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    # Imported by whoever compiled something, and not by us: it takes more than a second.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        return "_orig_mod"
    return None


def module_tensors(module: nn.Module, fqn: str) -> dict[str, Any]:
    """The unwrapped module's `state_dict`, with the live parameters (not detached) and under the module's own keys."""
    # An override may take no arguments; what it returns then shares the parameters' memory just the same.
    keeps = type(module).state_dict is nn.Module.state_dict or takes(module.state_dict, "keep_vars")
    found = state_dict_of(module, fqn, keep_vars=True) if keeps else state_dict_of(module, fqn)
    if not isinstance(found, Mapping):
        raise StateError(f"{fqn}: state_dict() of the module {type_name(module)} returned {type_name(found)}, not a dict")
    return found if isinstance(found, dict) else dict(found)


def frozen_names(module: nn.Module, tensors: Mapping[str, object]) -> set[str]:
    """Keys of `tensors` that are parameters of the module with requires_grad off."""
    names = {key for key, value in tensors.items() if isinstance(value, nn.Parameter | FlatShard) and not value.requires_grad}
    if type(module).state_dict is not nn.Module.state_dict:
        frozen = (name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad)
        names.update(name for name in frozen if name in tensors)
    return names


def clean_names(module: nn.Module, keys: Mapping[str, object]) -> dict[str, str]:
    """Keys of the module that carry a wrapper inside it (a compiled block, say) -> the keys that they are stored under."""
    if not any("_orig_mod." in key or ".module." in key for key in keys):
        return {}
    wrapped = {f"{path}.{inner}" for path, part in module.named_modules() if path and (inner := inner_name(part))}
    cleaned = {key: _without(wrapped, key) for key in keys}
    return {key: clean for key, clean in cleaned.items() if clean != key}


def _without(wrapped: set[str], key: str) -> str:
    kept: list[str] = []
    path = ""
    for part in key.split("."):
        path = f"{path}.{part}" if path else part
        if path not in wrapped:
            kept.append(part)
    return ".".join(kept)


def takes(function: object, argument: str) -> bool:
    """Whether `function` can be called with `argument` by keyword."""
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type]  # any callable; what is none raises
    except (TypeError, ValueError):
        return False
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def loading(value: object, fqn: str, load: Callable[[Any], object]) -> Callable[[Any], None]:
    """`load`, the object's own, with a StateError naming the object where it raises."""

    def run(state: Any) -> None:
        try:
            load(state)
        except Exception as error:  # the user's code: whatever it raises, every rank must hear of it
            raise StateError(
                f"{fqn}: load_state_dict() of {type_name(value)} failed, and the objects are now loaded in part: "
                f"{type(error).__name__}: {error}"
            ) from error

    return run


def state_dict_of(value: Any, fqn: str, **options: bool) -> object:
    """What the object's state_dict() returns; StateError naming the object where it raises."""
    try:
        return value.state_dict(**options)
    except Exception as error:  # the user's code: whatever it raises, the save is refused with the object's name
        raise StateError(f"{fqn}: state_dict() of {type_name(value)} failed: {type(error).__name__}: {error}") from error
