"""Dicts that some object's state_dict() made, passed where the object itself is meant.

What a load puts into such a dict never reaches the object: an optimizer would go on without its moments, learning rate and
schedule, and nothing would say so. So they are refused by name, when saving and when loading. The state_dict() of a module is
none of them: its tensors are the module's own memory, which is saved, and filled. A copy of one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from checkpointd.errors import StateError
from checkpointd_client.capture import objects


@dataclass(frozen=True, slots=True, eq=False)
class HandedOut:
    """A value that a state may hold: what an integration took from an object, and will itself put back into it."""

    content: object


def refused(state: object) -> StateError | None:
    """The error that names such a dict anywhere in the dicts, lists and tuples of `state`; None where there is none."""
    for path, value in _dicts(state, (), set()):
        error = _refused(value, path)
        if error is not None:
            return error
    return None


def _dicts(value: object, path: tuple[object, ...], seen: set[int]) -> Iterator[tuple[tuple[object, ...], Mapping[Any, Any]]]:
    if not isinstance(value, Mapping | list | tuple) or objects.is_object(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        yield path, value
    children = list(value.items()) if isinstance(value, Mapping) else list(enumerate(value))
    for key, child in children:
        if not isinstance(child, torch.Tensor):
            yield from _dicts(child, (*path, key), seen)


def _refused(value: Mapping[Any, Any], path: tuple[object, ...]) -> StateError | None:
    where = ".".join(map(str, path)) or "the state"
    for kind in _KINDS:
        if kind.made(value):
            key = path[-1] if path and isinstance(path[-1], str) else kind.name
            return StateError(
                f"{where} is the state_dict() of {kind.words}. Loading would fill this dict and leave the {kind.name} as it "
                f"is. Pass the {kind.name} itself: {{{key!r}: {kind.name}}}"
            )
    copied = _copied(value)
    if copied is None:
        return None
    return StateError(
        f"{where} is a copy of a module's state_dict(): nothing but this dict holds {copied!r}, and loading would leave the "
        "module as it is. Pass the module itself; or, where this copy is what you keep, pass dict(...) of it"
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    """What users call such an object in their code."""
    words: str
    made: Callable[[Mapping[Any, Any]], bool]


def _is_optimizers(value: Mapping[Any, Any]) -> bool:
    groups = value.get("param_groups")
    if isinstance(value.get("state"), Mapping) and isinstance(groups, list) and groups:
        return all(isinstance(group, Mapping) and "params" in group for group in groups)
    # As torch.distributed.checkpoint.state_dict flattens it.
    return any(type(key) is str and key.startswith("param_groups.") for key in value)


def _is_schedulers(value: Mapping[Any, Any]) -> bool:
    torchs = "last_epoch" in value and not value.keys().isdisjoint({"_step_count", "_last_lr", "_get_lr_called_within_step"})
    return torchs or {"_schedulers", "_last_lr"} <= value.keys() or value.keys() == {"last_batch_iteration"}


def _is_scalers(value: Mapping[Any, Any]) -> bool:
    return {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} <= value.keys()


def _is_loaders(value: Mapping[Any, Any]) -> bool:
    return "_iterator_finished" in value and not value.keys().isdisjoint({"_snapshot", "_num_yielded"})


_KINDS = (
    _Kind("optimizer", "an optimizer", _is_optimizers),
    _Kind("scheduler", "a learning-rate scheduler", _is_schedulers),
    _Kind("scaler", "a GradScaler", _is_scalers),
    _Kind("loader", "a data loader", _is_loaders),
)


def _copied(value: Mapping[Any, Any]) -> object | None:
    """The key of a tensor that nothing but `value` holds, where a module made `value`: torch leaves an attribute on it."""
    holders = getattr(torch._C, "_storage_Use_Count", None)
    live = any(isinstance(child, nn.Parameter) for child in value.values())  # keep_vars=True: the module's own objects
    if live or not hasattr(value, "_metadata") or holders is None:
        return None
    storages = [(key, child.untyped_storage()) for key, child in value.items() if type(child) is torch.Tensor and child.numel()]
    here = Counter(storage._cdata for _, storage in storages)
    # One count is of the Python object that asks.
    return next((key for key, storage in storages if holders(storage._cdata) <= here[storage._cdata] + 1), None)
