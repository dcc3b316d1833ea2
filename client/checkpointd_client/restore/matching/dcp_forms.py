"""State in the forms in which torch's distributed checkpoint (DCP) stores it, turned into a Checkpointer's.

DCP makes text of every key and drops empty dicts. It has more forms for optimizers: torch's `get_state_dict` names parameters
without the name that their module has in the state, and with `flatten_optimizer_state_dict=True` each value has an entry of its
own, such as `state.layers.0.weight.exp_avg` and `param_groups.layers.0.weight.lr`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any, TypeVar

import msgspec

from checkpointd.layout import tree

T = TypeVar("T")
STATE, GROUPS = "state.", "param_groups."


def with_numbers(node: tree.Dict, live: Mapping[Any, Any]) -> tree.Dict:
    """`node` with numbers for keys if the dict here has such keys."""
    has_numbers = bool(live) and all(type(key) is int for key in live)
    if not (has_numbers and all(isinstance(key, str) and key.removeprefix("-").isdecimal() for key, _ in node.items)):
        return node
    return msgspec.structs.replace(node, items=tuple((int(str(key)), child) for key, child in node.items))


def of_scheduler(node: tree.Node, live: object) -> tree.Node:
    """The stored state of a scheduler, and of those in it, with numbers for keys where the one here has them (`milestones`)."""
    if not isinstance(node, tree.Dict) or not hasattr(live, "__dict__"):
        return node
    own, items = vars(live), []
    for key, child in node.items:
        value = own.get(str(key))
        if isinstance(child, tree.Dict) and isinstance(value, Mapping):
            child = with_numbers(child, value)
        elif key == "_schedulers" and isinstance(child, tree.Sequence) and isinstance(value, list | tuple):
            within = map(of_scheduler, child.items, (*value, *[None] * len(child.items)))
            child = tree.with_elements(child, within)
        items.append((key, child))
    return msgspec.structs.replace(node, items=tuple(items))


# --- optimizers -------------------------------------------------------------------------------------------------------


def in_own_form(node: tree.Dict, groups: Iterable[Iterable[str]]) -> tree.Dict:
    """The stored state `node` of an optimizer whose parameters have the names in `groups` here, group by group. Names that no
    parameter here has stay as they are, and so does a state that DCP did not store.
    """
    parts = dict(node.items)
    if not parts.keys() & {"state", "param_groups"} and names_in(parts):
        return _nested(node, [list(group) for group in groups])
    stored = parts.get("param_groups")
    if not isinstance(stored, tree.Sequence):
        return node
    state = parts.get("state", tree.Dict("dict", ()))
    ids = list(chain.from_iterable(tree.elements(dict(tree.items(group)).get("params")) for group in stored.items))
    if not isinstance(state, tree.Dict):
        return node
    if ids and all(type(number) is int for number in ids):
        numbers = {str(number): number for number in ids}
        items = tuple((numbers.get(key, key) if isinstance(key, str) else key, child) for key, child in state.items)
        parts["state"] = msgspec.structs.replace(state, items=items)
    else:
        here = _here({name for name in ids if isinstance(name, str)}, set(chain.from_iterable(groups)))
        parts["state"] = msgspec.structs.replace(
            state, items=tuple((here.get(key, key) if isinstance(key, str) else key, child) for key, child in state.items)
        )
        parts["param_groups"] = tree.with_elements(stored, (_renamed(group, here) for group in stored.items))
    return msgspec.structs.replace(node, items=tuple(parts.items()))


def _renamed(group: tree.Node, here: Mapping[str, str]) -> tree.Node:
    if not isinstance(group, tree.Dict):
        return group
    parts = dict(group.items)
    ids = parts.get("params")
    if isinstance(ids, tree.Sequence):
        parts["params"] = tree.with_elements(
            ids, (here.get(name, name) if isinstance(name, str) else name for name in ids.items)
        )
    return msgspec.structs.replace(group, items=tuple(parts.items()))


def _here(stored: Collection[str], names: Collection[str]) -> dict[str, str]:
    """The name here of each `stored` name, if all have one prefix here, such as `model.`; empty if a name needs none."""
    if any(name in names for name in stored):
        return {}
    prefixes = Counter(
        name[: at + 1] for name in names for at, one in enumerate(name) if one == "." and name[at + 1 :] in stored
    )
    if not prefixes:
        return {}
    # Of several prefixes, the one under which most names are here; the shortest if these are equally many.
    best = min(prefixes, key=lambda prefix: (-prefixes[prefix], len(prefix)))
    return {name: best + name for name in stored if best + name in names}


def _nested(node: tree.Dict, groups: list[list[str]]) -> tree.Dict:
    """The nested form of a flattened state. Parameters that are in one group here, and had the same settings, are in one."""
    state, settings, others = by_name(node.items, names_in(key for key, _ in node.items))
    here = _here(settings.keys(), set(chain.from_iterable(groups)))
    group_of = {name: number for number, group in enumerate(groups) for name in group}
    found: dict[tuple[int, bytes], list[str]] = {(number, b""): [] for number in range(len(groups))}
    for name, items in settings.items():
        number = group_of.get(here.get(name, name), len(groups))
        found.setdefault((number, tree.encode(tree.Dict("dict", tuple(items.items())))), []).append(name)
    made: list[tree.Node] = []
    for (number, _), names in sorted(found.items(), key=lambda item: item[0][0]):
        if names or not groups[number]:
            ids = tree.Sequence("list", tuple(here.get(name, name) for name in names))
            made.append(tree.Dict("dict", (("params", ids), *(settings[names[0]].items() if names else ()))))
    entries = ((here.get(name, name), tree.Dict("dict", tuple(items.items()))) for name, items in state.items())
    nested = (("state", tree.Dict("dict", tuple(entries))), ("param_groups", tree.Sequence("list", tuple(made))))
    return msgspec.structs.replace(node, items=(*nested, *others.items()))


# --- the flattened form -----------------------------------------------------------------------------------------------


def names_in(keys: Iterable[object]) -> set[str]:
    """The names of the parameters, from the keys of their groups, which end in a key without dots."""
    return {key.removeprefix(GROUPS).rpartition(".")[0] for key in keys if isinstance(key, str) and key.startswith(GROUPS)}


def by_name(
    items: Iterable[tuple[Any, T]], names: set[str]
) -> tuple[dict[str, dict[str, T]], dict[str, dict[str, T]], dict[Any, T]]:
    """The state and the group of each parameter, by their keys, and all other items."""
    state: dict[str, dict[str, T]] = {}
    groups: dict[str, dict[str, T]] = {}
    others: dict[Any, T] = {}
    for key, value in items:
        text = key if isinstance(key, str) else ""
        prefix = next((prefix for prefix in (STATE, GROUPS) if text.startswith(prefix)), "")
        path = text.removeprefix(prefix)
        cuts = (path[:at] for at, letter in enumerate(path) if letter == ".")
        name = next((cut for cut in cuts if cut in names), None) if prefix else None
        if name is None:
            others[key] = value
        else:
            (state if prefix == STATE else groups).setdefault(name, {})[path[len(name) + 1 :]] = value
    return state, groups, others
