"""Tests whether an optimizer can continue with the stored state of another one.

The class does not decide: AdamW can continue from Adam, and a fused optimizer from one that is not. The state that the next
step needs does.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Iterable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch

from checkpointd.layout import tree
from checkpointd_client.capture import optimizer_layout
from checkpointd_client.capture.dtypes import NAMES, is_floating
from checkpointd_client.restore.matching.context import Context
from checkpointd_client.restore.stored import StridedView
from checkpointd_client.sharding.dtensor import FlatShard
from checkpointd_client.sharding.fsdp1 import Shards

OF_PARAMETERS = frozenset({"params", "param_names"})
"""The keys under which a group lists its parameters."""
OF_OTHERS = OF_PARAMETERS | {"initial_lr", "max_lr", "min_lr", "base_lr", "max_momentum", "base_momentum", "swa_lr"}
"""The keys that schedulers and torch itself keep in the group of any optimizer."""


@dataclass(frozen=True, slots=True)
class Live:
    """The optimizer as it is: its state_dict, and its parameters and their groups by number."""

    optimizer: torch.optim.Optimizer
    state: dict[str, Any]
    params: dict[Hashable, Any]
    groups: dict[Hashable, dict[str, Any]]
    shards: Shards


def other_kind(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    stored: Mapping[Hashable, Any],
    states: Iterable[Iterable[Hashable]],
    parameters: Iterable[Any],
) -> str | None:
    """Why the optimizer here cannot continue with a stored group in place of its own `group`; None if it can.

    `stored`: the keys of the stored group, with the values of the plain ones. `states`: the keys of the state of each parameter
    in it. `parameters`: those of the group here.
    """
    had, here = {str(key) for key in stored} - OF_OTHERS, set(map(str, group)) - OF_OTHERS
    extra, absent = sorted(had - here), sorted((here - had) & optimizer.defaults.keys())
    if extra and absent:
        return f"{', '.join(extra)} is stored, and {', '.join(absent)} is there now"
    # Another version of torch may have more or fewer hyperparameters. So may another kind of optimizer, with other state.
    has = {str(key) for state in states for key in state}
    if not (extra or absent) or not has:
        return None
    parameter = next((p for p in parameters if not isinstance(p, FlatShard)), None)
    if parameter is None:
        return None
    plain = {str(key): value for key, value in stored.items() if value is not None and key in group}
    needed = optimizer_layout.FirstStep(optimizer, {**group, **plain}, parameter).at(())
    lacking = sorted({str(key) for key in needed} - has) if isinstance(needed, Mapping) else []
    if not lacking:
        return None
    return f"the state of its parameters has {', '.join(sorted(has))}, and this one needs {', '.join(lacking)}"


def misfit(
    match: Context, live: Live, key: Hashable, number: Hashable, node: tree.Node | None, following: frozenset[Hashable]
) -> str | None:
    """Why the state that is stored for `key` cannot be that of the parameter here, whether or not that has some."""
    parameter, was = live.params[number], match.stored.find(key)
    shape, tensors = tuple(parameter.shape), _tensors_of(match, node)
    if was is None:
        wrong = next((place for name, place in tensors if name in following and not _broadcasts(place.shape, shape)), None)
        return None if wrong is None else f"a tensor of shape {wrong.shape} is stored, and its parameter has {shape} now"
    if was.shape != shape:
        return f"it is of a parameter of shape {was.shape}, and the one here has {shape}"
    if _has_some(live.state["state"].get(number)) or (match.cast and parameter.is_floating_point() and is_floating(was.dtype)):
        return None
    dtype = NAMES.get(parameter.dtype, str(parameter.dtype))
    alike = any((place.shape, place.dtype) == (was.shape, was.dtype) for _, place in tensors)
    return f"it is of a parameter of dtype {was.dtype}, and the one here has {dtype}" if alike and was.dtype != dtype else None


def _has_some(state: object) -> bool:
    """Whether a parameter's state, in most optimizers a dict, holds anything."""
    return state is not None and (not isinstance(state, Sized) or isinstance(state, torch.Tensor) or len(state) > 0)


def following_kinds(
    match: Context, live: Live, ours: Mapping[Hashable, Hashable], nodes: Mapping[Hashable, tree.Node]
) -> frozenset[Hashable]:
    """The kinds of state (`exp_avg`) whose tensors mostly have the shape of their parameter here, counted over the parameters
    whose stored shape is unknown.
    """
    counts: collections.Counter[tuple[Hashable, bool]] = collections.Counter()
    for key, number in ours.items():
        if key in nodes and match.stored.find(key) is None:
            shape = tuple(live.params[number].shape)
            counts.update((name, place.shape == shape) for name, place in _tensors_of(match, nodes[key]) if place.shape)
    return frozenset(name for (name, same), count in counts.items() if same and count > counts[name, False])


def _tensors_of(match: Context, node: tree.Node | None) -> list[tuple[Hashable, StridedView]]:
    """The tensors in the state of one parameter, by key."""
    if not isinstance(node, tree.Dict):
        return []
    children = match.stored.children(node)
    return [(key, match.stored.place(child.fqn)) for key, child in children if isinstance(child, tree.Tensor)]


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(reversed(shape), reversed(to), strict=False))
