"""Refuses the state_dict() of an object where the object itself is meant.

A load would fill the dict and never reach the object: an optimizer would silently go on without its moments, learning rate and
schedule. So saves and loads refuse such dicts, and name them. The state_dict() of a module is accepted, because its tensors
share the module's memory. A copy of it is refused.
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
from checkpointd_client.capture.plain.containers import is_container, pairs_in


@dataclass(frozen=True, slots=True, eq=False)
class HandedOut:
    """A value that a state may contain: an integration took `content` from an object, and will put it back itself."""

    content: object


def refused(state: object) -> StateError | None:
    """The error that names the first such dict in the containers of `state`; None if there is none."""
    for path, value in _dicts(state, (), set()):
        error = _refused(value, path)
        if error is not None:
            return error
    return None


def _dicts(value: Any, path: tuple[object, ...], seen: set[int]) -> Iterator[tuple[tuple[object, ...], Mapping[Any, Any]]]:
    if not is_container(value) or objects.is_object(value) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        yield path, value
    for key, child in list(pairs_in(value)):
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
        f"{where} is a copy of a module's state_dict(): no other object uses the memory of {copied!r}, so loading would leave "
        "the module as it is. Pass the module itself; or, if you mean to store this copy, pass dict(...) of it"
    )


@dataclass(frozen=True, slots=True)
class _Kind:
    name: str
    """The usual name of such an object in code."""
    words: str
    made: Callable[[Mapping[Any, Any]], bool]


def _is_optimizers(value: Mapping[Any, Any]) -> bool:
    groups = value.get("param_groups")
    if isinstance(value.get("state"), Mapping) and isinstance(groups, list) and groups:
        return all(isinstance(group, Mapping) and "params" in group for group in groups)
    # The flat form of torch.distributed.checkpoint.state_dict.
    return any(type(key) is str and key.startswith("param_groups.") for key in value)


def _is_schedulers(value: Mapping[Any, Any]) -> bool:
    torchs = "last_epoch" in value and not value.keys().isdisjoint({"_step_count", "_last_lr", "_get_lr_called_within_step"})
    return torchs or {"_schedulers", "_last_lr"} <= value.keys() or value.keys() == {"last_batch_iteration"}


def _is_scalers(value: Mapping[Any, Any]) -> bool:
    return {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"} <= value.keys()


def _is_loaders(value: Mapping[Any, Any]) -> bool:
    torchdatas = "_iterator_finished" in value and not value.keys().isdisjoint({"_snapshot", "_num_yielded"})
    return torchdatas or {"samples_seen", "dataset_size"} <= value.keys()  # a ReshardingLoader's


_KINDS = (
    _Kind("optimizer", "an optimizer", _is_optimizers),
    _Kind("scheduler", "a learning-rate scheduler", _is_schedulers),
    _Kind("scaler", "a GradScaler", _is_scalers),
    _Kind("loader", "a data loader", _is_loaders),
)


def _copied(value: Mapping[Any, Any]) -> object | None:
    """If a module made `value`, which torch marks by an attribute: the key of a tensor whose memory only `value` uses."""
    holders = getattr(torch._C, "_storage_Use_Count", None)
    live = any(isinstance(child, nn.Parameter) for child in value.values())  # keep_vars=True: the module's own objects
    if live or not hasattr(value, "_metadata") or holders is None:
        return None
    storages = [(key, child.untyped_storage()) for key, child in value.items() if type(child) is torch.Tensor and child.numel()]
    here = Counter(storage._cdata for _, storage in storages)
    # The storage object here counts as one use.
    return next((key for key, storage in storages if holders(storage._cdata) <= here[storage._cdata] + 1), None)
