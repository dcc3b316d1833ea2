"""Matches an object that returned its state as DTensors, such as torch's get_state_dict() of a model and its optimizers.

Such an object loads its dict itself, and torch's own functions fail if a parameter is missing or unknown. So it gets exactly
the parameters that it handed out: with the stored values if they fit, otherwise as they are. MATCHOPT-1 to MATCHOPT-3 of
match_optimizer.py hold for its optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import chain
from typing import Any

import msgspec
import torch

from checkpointd.layout import tree
from checkpointd_client.restore import building
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.matching.context import Context
from checkpointd_client.restore.matching.dcp_forms import GROUPS, STATE, by_name, names_in
from checkpointd_client.restore.matching.match_optimizer import Trial, by_order, filled, filled_group, ids_by_group
from checkpointd_client.restore.matching.optimizer_fit import OF_OTHERS
from checkpointd_client.sharding.dtensor import is_dtensor


def handed_back(match: Context, live: Any, node: tree.Node, fqn: str) -> Build:
    """The state for the object that handed out `live`: the stored one, with the tensors of `live` filled if it has them."""
    if isinstance(live, Mapping) and isinstance(node, tree.Dict):
        if any(type(key) is str and key.startswith(GROUPS) for key in live):
            return _flat_optimizer(match, live, node, fqn)
        return (_optimizer if _is_optimizers(live) else _mapping)(match, live, node, fqn)
    if isinstance(live, list | tuple) and isinstance(node, tree.Sequence):
        pairs = ((live[i] if i < len(live) else None, child, f"{fqn}.{i}") for i, child in enumerate(node.items))
        return building.sequence_of(node, [handed_back(match, *pair) for pair in pairs], known=type(live))
    if is_dtensor(live):
        return match.tensor(live, node, fqn, replaceable=True) or building.given(live)
    return filled(match, live, node, fqn)


def _mapping(match: Context, live: Mapping[Any, Any], node: tree.Dict, fqn: str) -> Build:
    """A dict with DTensors is a model's: it gets exactly the tensors that it has. All other values are taken as stored."""
    is_models = any(map(is_dtensor, live.values()))
    parts: dict[Hashable, Build] = {}
    for key, child in match.stored.children(node):
        if is_models and key not in live and isinstance(child, tree.Tensor):
            match.note_unexpected(f"{fqn}.{key}")
        else:
            parts[key] = handed_back(match, live.get(key), child, f"{fqn}.{key}")
    for key, value in live.items() if is_models else ():
        if key not in parts and isinstance(value, torch.Tensor):
            match.note_missing(f"{fqn}.{key}")
            parts[key] = building.given(value)
    return match.dict_of(node, parts)


# --- optimizers -----------------------------------------------------------------------------------------------------


def _is_optimizers(value: Mapping[Any, Any]) -> bool:
    groups = value.get("param_groups")
    has_groups = isinstance(groups, list) and all(isinstance(group, Mapping) and "params" in group for group in groups)
    return has_groups and isinstance(value.get("state"), Mapping)


def _optimizer(match: Context, live: Mapping[Any, Any], node: tree.Dict, fqn: str, *, is_flat: bool = False) -> Build:
    stored_ids = ids_by_group(match, node)
    if stored_ids is None:
        match.mismatched.append(f"{fqn}: it is an optimizer's state now, and the stored value does not have that form")
        return building.given(live)
    ours = _paired(match, stored_ids, [list(group["params"]) for group in live["param_groups"]], fqn)
    if ours is None:
        return building.given(live)
    parts = dict(match.stored.children(node))
    state, groups = parts.pop("state"), parts.pop("param_groups")
    assert isinstance(state, tree.Dict)  # ids_by_group looked
    assert isinstance(groups, tree.Sequence)
    made: list[Build] = []
    left: set[Hashable] = set()
    group_of = {ours[key]: j for j, ids in enumerate(stored_ids) for key in ids if key in ours}
    for i, group in enumerate(live["param_groups"]):
        path = f"{fqn}.param_groups.{group['params'][0] if is_flat else i}"
        found = {group_of[key] for key in group["params"] if key in group_of}
        if not group["params"] and i < len(stored_ids) and not stored_ids[i]:
            found = {i}
        build = _group(match, [groups.items[j] for j in sorted(found)], group, path)
        if build is None:
            left.update(group["params"])
        made.append(build or building.given(group))
    entries = _entries(match, live, state, ours, set(chain(*stored_ids)), left, fqn)
    others = {key: handed_back(match, live.get(key), child, f"{fqn}.{key}") for key, child in parts.items()}
    return building.dict_of(
        "dict",
        {"state": building.dict_of("dict", entries), "param_groups": building.list_of(made), **others},
    )


def _paired(
    match: Context, stored_ids: list[list[Hashable]], live_ids: list[list[Hashable]], fqn: str
) -> dict[Hashable, Hashable] | None:
    """The name or number here of each stored parameter; None, with a note, if they cannot be paired."""
    stored, live = list(chain(*stored_ids)), list(chain(*live_ids))
    if any(isinstance(key, str) for key in (*stored, *live)):
        for key in dict.fromkeys(stored):
            if key not in live:
                match.note_unexpected(f"{fqn}.state.{key}")
        for key in dict.fromkeys(live):
            if key not in stored:
                match.note_missing(f"{fqn}.state.{key}")
        return {key: key for key in stored if key in live}
    return by_order(match, stored_ids, live_ids, fqn)


def _group(match: Context, nodes: list[tree.Node], live: Mapping[str, Any], fqn: str) -> Build | None:
    """The stored settings of a group, with the parameters that it has now; None if they do not fit, or none are stored."""
    if len(nodes) > 1:
        were = f"its parameters were in {len(nodes)} groups"
        match.mismatched.append(f"{fqn}: {were}, so the group and their state are left as they are")
    if not nodes and not live["params"]:
        match.note_missing(fqn)
    if len(nodes) != 1:
        return None
    [node] = nodes
    assert isinstance(node, tree.Dict)  # ids_by_group looked
    had, has = {str(key) for key, _ in match.stored.children(node)} - OF_OTHERS, set(map(str, live)) - OF_OTHERS
    if had - has and has - had:
        match.mismatched.append(
            f"{fqn}: it was saved from another kind of optimizer: {', '.join(sorted(had - has))} is stored, and "
            f"{', '.join(sorted(has - had))} is there now; neither the group nor the state of its parameters can be loaded"
        )
        return None
    return filled_group(match, node, live, (), fqn)


def _entries(
    match: Context,
    live: Mapping[Any, Any],
    state: tree.Dict,
    ours: Mapping[Hashable, Hashable],
    stored_ids: set[Hashable],
    left: set[Hashable],
    fqn: str,
) -> dict[Hashable, Build]:
    """The state of every parameter here: as stored if it fits, otherwise as it is. So is that of the parameters `left`."""
    nodes, there = dict(match.stored.children(state)), live["state"]
    entries: dict[Hashable, Build] = {}
    kept = set(chain(*(group["params"] for group in live["param_groups"]))) - set(ours.values()) | left
    for key, child in nodes.items():
        path = f"{fqn}.state.{key}"
        if key not in stored_ids:  # a hook added it
            entries[key] = handed_back(match, there.get(key), child, path)
        elif key in ours and ours[key] not in kept:
            trial = Trial(match)
            build = filled(match, there.get(ours[key]), child, path)
            if trial.fits(path):
                entries[ours[key]] = build
            else:
                kept.add(ours[key])
    for key, name in ours.items():
        # Torch wants state for every name. A numbered parameter may have none, as before its first step.
        if isinstance(name, str) and key not in nodes and there.get(name) and name not in kept:
            match.note_missing(f"{fqn}.state.{name}")
            kept.add(name)
    return entries | {key: building.given(there[key]) for key in kept if key in there}


# --- optimizers whose state is one dict, as flatten_optimizer_state_dict=True makes it --------------------------------


def _flat_optimizer(match: Context, live: Mapping[Any, Any], node: tree.Dict, fqn: str) -> Build:
    """Match it as a nested optimizer state in which each parameter is a group."""
    names = names_in(live) | names_in(key for key, _ in node.items)

    def group_of(name: str, items: Iterable[tuple[Any, tree.Node]]) -> tree.Dict:
        return tree.Dict("dict", (("params", tree.Sequence("list", (name,))), *items))

    state, groups, others = by_name(node.items, names)
    nested = {
        "state": tree.Dict("dict", tuple((name, tree.Dict("dict", tuple(items.items()))) for name, items in state.items())),
        "param_groups": tree.Sequence("list", tuple(group_of(name, items.items()) for name, items in groups.items())),
        **others,
    }
    own_state, own_groups, own_others = by_name(live.items(), names)
    own = {
        "state": own_state,
        "param_groups": [{"params": [name], **items} for name, items in own_groups.items()],
        **own_others,
    }
    build: Callable[[], Any] = _optimizer(
        match, own, msgspec.structs.replace(node, items=tuple(nested.items())), fqn, is_flat=True
    )
    return lambda: _flattened(build())


def _flattened(optimizer: Mapping[Any, Any]) -> dict[Any, Any]:
    found = {key: value for key, value in optimizer.items() if key not in ("state", "param_groups")}
    for name, entry in optimizer["state"].items():
        found |= {f"{STATE}{name}.{key}": value for key, value in entry.items()}
    for group in optimizer["param_groups"]:
        [name] = group["params"]
        found |= {f"{GROUPS}{name}.{key}": value for key, value in group.items() if key != "params"}
    return found
