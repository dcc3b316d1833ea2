"""The match for torch's optimizers, whose state may not exist yet and whose `load_state_dict` converts what it is given."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from checkpointd.layout import tree
from checkpointd_client import building, objects
from checkpointd_client.building import Build
from checkpointd_client.steps import Turn

if TYPE_CHECKING:
    from checkpointd_client.match import Matcher


@dataclass(frozen=True, slots=True)
class _Params:
    """An optimizer's parameters, their live numbers and groups, by the numbers that the checkpoint gives them."""

    by_id: dict[Hashable, torch.Tensor]
    live_ids: dict[Hashable, Hashable]
    groups: dict[Hashable, dict[str, Any]]


def match_optimizer(match: Matcher, optimizer: torch.optim.Optimizer, node: tree.Dict, fqn: str) -> bool:
    """Existing state is filled in place, the rest made; then `load_state_dict`, and every tensor put back that it converted."""
    live = objects.state_dict_of(optimizer, fqn)
    live_ids = _live_ids(live)
    if live_ids is None or not isinstance(live, dict):  # an optimizer with a state_dict of its own making
        match.do(Turn.OPTIMIZERS, match.fresh(node), objects.loading(optimizer, fqn, optimizer.load_state_dict))
        return True
    stored_ids = _stored_ids(match, node)
    if stored_ids is None:
        return False
    if list(map(len, stored_ids)) != list(map(len, live_ids)):
        counts = f"{list(map(len, stored_ids))} stored and {list(map(len, live_ids))} now"
        match.mismatched.append(f"{fqn}: the numbers of parameters in its param_groups differ: {counts}")
        return True
    params = _params(optimizer, stored_ids, live_ids)
    build = _whole(match, params, dict(match.stored.children(node)), live, fqn)
    load = objects.loading(optimizer, fqn, lambda state: _load_optimizer(optimizer, params, state))
    match.do(Turn.OPTIMIZERS, build, load)
    return True


def _live_ids(live: Any) -> list[list[Hashable]] | None:
    """Parameter numbers by group, where `live` looks like what torch's optimizers return."""
    try:
        return [list(group["params"]) for group in live["param_groups"]] if "state" in live else None
    except (TypeError, KeyError):
        return None


def _stored_ids(match: Matcher, node: tree.Dict) -> list[list[Hashable]] | None:
    parts = dict(match.stored.children(node))
    groups = parts.get("param_groups")
    if not isinstance(parts.get("state"), tree.Dict) or not isinstance(groups, tree.Sequence):
        return None
    found: list[list[Hashable]] = []
    for group in groups.items:
        ids = dict(match.stored.children(group)).get("params") if isinstance(group, tree.Dict) else None
        if not isinstance(ids, tree.Sequence) or not all(isinstance(i, int) for i in ids.items):
            return None
        found.append(list(ids.items))
    return found


def _params(optimizer: torch.optim.Optimizer, stored_ids: list[list[Hashable]], live_ids: list[list[Hashable]]) -> _Params:
    stored, live = list(chain(*stored_ids)), list(chain(*live_ids))
    tensors = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    groups = chain.from_iterable([group] * len(group["params"]) for group in optimizer.param_groups)
    return _Params(
        dict(zip(stored, tensors, strict=False)),
        dict(zip(stored, live, strict=True)),
        dict(zip(stored, groups, strict=False)),
    )


def _whole(match: Matcher, params: _Params, stored: dict[Hashable, tree.Node], live: dict[str, Any], fqn: str) -> Build:
    """The dict for `load_state_dict`: live tensors where there are some, new ones elsewhere, every other value as stored."""
    state = stored.pop("state")
    assert isinstance(state, tree.Dict)  # _stored_ids looked
    entries: dict[Hashable, Build] = {}
    for number, node in match.stored.children(state):
        entry = live["state"].get(params.live_ids.get(number, number))
        entries[number] = _entry(match, params, number, node, entry, f"{fqn}.state.{number}")
    parts = {key: _replaced(match, node, _item(live, key), f"{fqn}.{key}", None) for key, node in stored.items()}
    return building.dict_of("dict", {"state": building.dict_of("dict", entries), **parts})


def _entry(match: Matcher, params: _Params, number: Hashable, node: tree.Node, live: Any, fqn: str) -> Build:
    """The state of one parameter: on its device, but for step counts, which torch keeps on the host."""
    if number not in params.by_id or not isinstance(node, tree.Dict):
        return _replaced(match, node, live, fqn, None)
    device = params.by_id[number].device
    group = params.groups[number]
    steps_stay = not (group.get("capturable") or group.get("fused"))
    parts: dict[Hashable, Build] = {}
    for key, child in match.stored.children(node):
        where = torch.device("cpu") if key == "step" and steps_stay else device
        parts[key] = _replaced(match, child, _item(live, key), f"{fqn}.{key}", where)
    return building.dict_of(node.kind, parts)


def _replaced(match: Matcher, node: tree.Node, live: Any, fqn: str, device: torch.device | None) -> Build:
    """Whatever is stored, with the live tensors in it where there are some at the same places."""
    if isinstance(node, tree.Tensor) and isinstance(live, torch.Tensor):
        return match.tensor(live, node, fqn, replaceable=True) or (lambda: live)
    if isinstance(node, tree.Dict):
        children = match.stored.children(node)
        parts = {key: _replaced(match, child, _item(live, key), f"{fqn}.{key}", device) for key, child in children}
        return building.dict_of(node.kind, parts)
    if isinstance(node, tree.Sequence):
        numbered = enumerate(node.items)
        return building.sequence_of(
            node.kind, [_replaced(match, child, _item(live, i), f"{fqn}.{i}", device) for i, child in numbered]
        )
    return match.fresh(node, device)


def _item(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, list | tuple) and isinstance(key, int):
        return live[key] if key < len(live) else None
    return None


def _load_optimizer(optimizer: torch.optim.Optimizer, params: _Params, state: dict[str, Any]) -> None:
    optimizer.load_state_dict(state)
    # torch casts floating-point state to its parameter's dtype, and deep-copies what stands in the groups.
    for number, entry in state["state"].items():
        _put_back(optimizer.state.get(params.by_id.get(number, number)), entry)
    for group, ours in zip(optimizer.param_groups, state["param_groups"], strict=False):
        _put_back(group, {key: value for key, value in ours.items() if key != "params"})


def _put_back(loaded: Any, ours: Any) -> None:
    """Put our tensors, texts and bytes into `loaded`, wherever it still has their like."""
    items = ours.items() if isinstance(ours, Mapping) else enumerate(ours) if isinstance(ours, list) else ()
    for key, value in items:
        there = _item(loaded, key)
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            loaded[key] = value if value.device == there.device else value.to(there.device)
        elif isinstance(value, str | bytes):
            loaded[key] = value  # torch rebuilds every iterable from its items, which garbles these
        else:
            _put_back(there, value)
