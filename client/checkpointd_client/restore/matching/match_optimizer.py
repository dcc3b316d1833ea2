"""Matches torch's optimizers, whose state may not exist yet and whose `load_state_dict` converts its argument.

State that is stored under the names of parameters goes to the parameters with those names. State under numbers goes by the
order of the parameters, group by group: that is how it is stored if no module of the state names them.

Invariants
  MATCHOPT-1  The state of a parameter is loaded whole, or stays as it is and is reported: never are some of its tensors old and
      some new.
  MATCHOPT-2  A param group of another kind keeps its own hyperparameters, and the state of its parameters stays as it is.
  MATCHOPT-3  The state of parameters that were not stored stays as it is.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import msgspec
import torch
from torch.nn.parameter import is_lazy

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd_client.capture import objects, optimizer_layout, optimizers
from checkpointd_client.capture.plain.containers import NAMESPACES
from checkpointd_client.capture.tensor_kinds.blocks import BLOCKS
from checkpointd_client.capture.tensor_kinds.low_bit import is_low_bit, is_ordinary, state_like
from checkpointd_client.capture.tensor_kinds.sharded import ROWS
from checkpointd_client.capture.tensors import is_meta, refuse_meta
from checkpointd_client.restore import building
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.matching.context import Context, Groups, StepOrder
from checkpointd_client.restore.matching.conversion import shape_of
from checkpointd_client.restore.matching.dcp_forms import in_own_form
from checkpointd_client.restore.matching.optimizer_fit import (
    OF_OTHERS,
    OF_PARAMETERS,
    Live,
    following_kinds,
    misfit,
    other_kind,
)
from checkpointd_client.restore.stored import StridedView
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import FlatShard, is_dtensor, sharded_like


@dataclass(frozen=True, slots=True)
class _Pairing:
    """For each stored parameter its number in the optimizer here (`numbers`), and for each group here its stored group."""

    numbers: dict[Hashable, Hashable]
    groups: list[int | None]
    """None for a group of which nothing is stored: it stays as it is."""
    stored: frozenset[Hashable]
    """All stored parameters, also those that no parameter here matches."""


def match_optimizer(match: Context, optimizer: torch.optim.Optimizer, node: tree.Dict, fqn: str) -> bool:
    """Fill existing state in place, make the rest, call `load_state_dict`, and put back every tensor that it converted."""
    live = _live(match, optimizer, fqn)
    if live is None:  # an optimizer with a state_dict of its own making
        if match.left_below(fqn):
            match.per_rank_left.append(fqn)
            return True
        match.do(StepOrder.OPTIMIZERS, match.fresh(node), objects.loading(optimizer, fqn, optimizer.load_state_dict))
        return True
    left = match.left_below(fqn)
    if not left:  # which has the stored names
        node = in_own_form(node, _names_by_group(match, live))
    stored_ids = ids_by_group(match, node)
    for path in left:
        match.note_different(path)
    if stored_ids is None:
        return bool(left)
    pairing = _paired(match, live, stored_ids, node, fqn)
    match.groups[id(optimizer)] = Groups(None if pairing is None else pairing.groups, len(stored_ids))
    build = _whole(match, live, pairing, dict(match.stored.children(node)), fqn) if pairing is not None else None
    if build is not None:
        load = objects.loading(optimizer, fqn, lambda state: _load_optimizer(live, state))
        match.do(StepOrder.OPTIMIZERS, build, load)
    return True


def _live(match: Context, optimizer: torch.optim.Optimizer, fqn: str) -> Live | None:
    shards = match.modules.shards()
    state = optimizers.state_dict(optimizer, fqn, shards)
    params = optimizers.numbered(optimizer, state, shards)
    if params is None or not isinstance(state, dict):
        return None
    known = match.modules.names()
    alone = [f"parameter {number}" for number, one in params.items() if is_meta(one) and id(one) not in known]
    refuse_meta(fqn, alone)
    if any(is_lazy(one) for one in params.values()):
        raise StateError(
            f"{fqn}: some of its parameters have no shape yet, since they are of a lazy module: run one forward pass first"
        )
    pairs = zip(optimizer.param_groups, state["param_groups"], strict=True)
    groups = {number: live for live, group in pairs for number in group["params"]}
    return Live(optimizer, state, params, groups, shards)


def _names_by_group(match: Context, live: Live) -> list[list[str]]:
    """All names of the parameters of each group here."""
    number_of = {id(parameter): number for number, parameter in live.params.items()}
    names: dict[Hashable, list[str]] = {}
    for name, one in match.modules.all_names().items():
        if id(one) in number_of:
            names.setdefault(number_of[id(one)], []).append(name)
    return [list(chain.from_iterable(names.get(number, ()) for number in g["params"])) for g in live.state["param_groups"]]


def ids_by_group(match: Context, node: tree.Dict) -> list[list[Hashable]] | None:
    """Names or numbers of the stored parameters by group; None if this is not the state of a torch optimizer."""
    parts = dict(match.stored.children(node))
    groups = parts.get("param_groups")
    if not isinstance(parts.get("state"), tree.Dict) or not isinstance(groups, tree.Sequence):
        return None
    found: list[list[Hashable]] = []
    for group in groups.items:
        ids = dict(match.stored.children(group)).get("params")
        if not isinstance(ids, tree.Sequence) or not all(isinstance(i, int | str) for i in ids.items):
            return None
        found.append([i for i in ids.items if isinstance(i, int | str)])
    return found


# --- which parameter is which ---------------------------------------------------------------------------------------


def _paired(match: Context, live: Live, stored_ids: list[list[Hashable]], node: tree.Dict, fqn: str) -> _Pairing | None:
    """Pair stored and live parameters; None, with a note, if that is impossible."""
    ids, live_ids = list(chain(*stored_ids)), [list(group["params"]) for group in live.state["param_groups"]]
    if any(isinstance(name, str) for name in ids):
        number_of = {id(parameter): number for number, parameter in live.params.items()}
        names = match.modules.all_names()
        known = {name: id(names[here]) for name in ids if (here := match.renamed.get(str(name), name)) in names}
        named: dict[Hashable, Hashable] = {}
        taken: set[int] = set()
        for name, it in known.items():
            # If parameters are tied now and were not when saved, the state of the first one counts.
            if it in number_of and it not in taken:
                named[name] = number_of[it]
                taken.add(it)
        # If names are known, no parameter goes by its place: it could get the state of another one.
        if named or not number_of.keys().isdisjoint(match.modules.names()):
            return _by_name(match, live, stored_ids, node, named, fqn)
    numbers = by_order(match, stored_ids, live_ids, fqn)
    return None if numbers is None else _Pairing(numbers, list(range(len(live_ids))), frozenset(numbers))


def by_order(
    match: Context, stored_ids: list[list[Hashable]], live_ids: list[list[Hashable]], fqn: str
) -> dict[Hashable, Hashable] | None:
    """The live parameter of each stored one, by its place in the param_groups; None, with a note, if the numbers differ."""
    if list(map(len, stored_ids)) != list(map(len, live_ids)):
        counts = f"{list(map(len, stored_ids))} stored and {list(map(len, live_ids))} now"
        match.mismatched.append(f"{fqn}: the numbers of parameters in its param_groups differ: {counts}")
        return None
    return dict(zip(chain(*stored_ids), chain(*live_ids), strict=True))


def _by_name(
    match: Context,
    live: Live,
    stored_ids: list[list[Hashable]],
    node: tree.Dict,
    numbers: dict[Hashable, Hashable],
    fqn: str,
) -> _Pairing | None:
    settings = [_settings(group) for group in tree.children(dict(match.stored.children(node))["param_groups"])]
    for name in chain(*stored_ids):
        if name not in numbers:
            match.note_unexpected(f"{fqn}.state.{name}")
    found = set(numbers.values())
    names = match.modules.names()
    for number, parameter in live.params.items():
        if number not in found:
            match.note_missing(f"{fqn}.state.{names.get(id(parameter), number)}")
    group_of = {numbers[name]: j for j, group in enumerate(stored_ids) for name in group if name in numbers}
    groups: list[int | None] = []
    for i, group in enumerate(live.state["param_groups"]):
        stored = {group_of[number] for number in group["params"] if number in group_of}
        # Ranks that held other layers may have had groups with the same settings at other positions.
        if not all(match.are_alike(settings[min(stored)], settings[j]) for j in stored):
            match.mismatched.append(f"{fqn}.param_groups.{i}: its parameters are those of the stored groups {sorted(stored)}")
            return None
        # A group without parameters matches by position, if none of the stored group's parameters are here either.
        alike = not group["params"] and i < len(stored_ids) and numbers.keys().isdisjoint(stored_ids[i])
        alike = alike and (not stored_ids[i] or len(stored_ids) == len(live.state["param_groups"]))
        if not (stored or alike):
            match.note_missing(f"{fqn}.param_groups.{i}")
        groups.append(min(stored) if stored else i if alike else None)
    return _Pairing(numbers, groups, frozenset(chain(*stored_ids)))


# --- what load_state_dict is given ----------------------------------------------------------------------------------


def _whole(match: Context, live: Live, pairing: _Pairing, stored: dict[Hashable, tree.Node], fqn: str) -> Build | None:
    """The dict for `load_state_dict`: live tensors if they exist, new ones otherwise, and all other values as stored.

    None if nothing fits.
    """
    state, groups = stored.pop("state"), stored.pop("param_groups")
    assert isinstance(state, tree.Dict)  # ids_by_group looked
    assert isinstance(groups, tree.Sequence)
    of_hooks = stored or any(key not in pairing.stored for key, _ in match.stored.children(state))
    if not (of_hooks or pairing.numbers or any(j is not None for j in pairing.groups)):
        return None
    made: list[Build] = []
    of_another_kind: set[Hashable] = set()
    for i, (j, group) in enumerate(zip(pairing.groups, live.state["param_groups"], strict=True)):
        node, path = None if j is None else groups.items[j], f"{fqn}.param_groups.{i}"
        build: Build | None = None
        if node is not None and _is_of_kind(match, live, pairing, node, state, group, path):
            apart = _split(live.state["param_groups"], pairing.groups, i)
            if isinstance(node, tree.Dict) and i > pairing.groups.index(j):  # a stored tensor fills one
                apart += [
                    str(key) for key, one in match.stored.children(node) if isinstance(one, tree.Tensor) and key not in apart
                ]
            split = "its parameters were in one group and are in several now, so each group keeps its own value"
            match.mismatched += [f"{path}.{key}: {split}" for key in apart]
            build = filled_group(match, node, group, apart, path)
        if node is not None and build is None:
            of_another_kind.update(group["params"])
        made.append(build or partial(dict, group))
    if of_another_kind and of_another_kind >= live.params.keys():
        return None
    entries = _entries(match, live, pairing, state, of_another_kind, fqn)
    parts = {key: filled(match, _item(live.state, key), node, f"{fqn}.{key}") for key, node in stored.items()}
    return building.dict_of(
        "dict",
        {"state": building.dict_of("dict", entries), "param_groups": building.list_of(made), **parts},
    )


def _split(groups: list[dict[str, Any]], stored: list[int | None], number: int) -> list[str]:
    """The hyperparameters in which group `number` differs from other groups here that come from the same stored group."""
    others = [group for group, j in zip(groups, stored, strict=True) if j == stored[number]]
    own = groups[number]
    return sorted(str(key) for key in own if any(not _alike(own[key], o.get(key)) for o in others) and key not in OF_OTHERS)


def _alike(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())
    return type(one) is type(other) and bool(one == other)


def filled_group(match: Context, node: tree.Node, live: Mapping[str, Any], left: Collection[str], fqn: str) -> Build | None:
    """The stored settings of a group, with the numbers that its parameters have now; None if a part of them does not fit.

    Settings that are not stored stay, since another version of torch or a scheduler may have added them; so do those in `left`.
    """
    trial = Trial(match)
    build = filled(match, live, _settings(node, left), fqn)
    if trial.fits(fqn):
        return lambda: {**live, **build(), "params": list(live["params"])}
    match.mismatched[-1] += ", and so is the state of its parameters"
    return None


def _settings(group: tree.Node, left: Collection[object] = ()) -> tree.Dict:
    """A stored group without the list of its parameters and without the settings in `left`."""
    assert isinstance(group, tree.Dict)  # ids_by_group looked
    kept = tuple((key, child) for key, child in group.items if key not in {*OF_PARAMETERS, *left})
    return msgspec.structs.replace(group, items=kept)


def _is_of_kind(
    match: Context, live: Live, pairing: _Pairing, node: tree.Node, state: tree.Dict, group: Mapping[str, Any], fqn: str
) -> bool:
    assert isinstance(node, tree.Dict)  # ids_by_group looked
    plain = {
        key: building.constant(child)() if building.is_scalar(child) else None for key, child in match.stored.children(node)
    }
    numbers = set(group["params"])
    ours = {key for key, number in pairing.numbers.items() if number in numbers}
    states = [
        [name for name, _ in match.stored.children(entry)]
        for key, entry in match.stored.children(state)
        if key in ours and isinstance(entry, tree.Dict)
    ]
    parameters = [live.params[number] for number in group["params"] if number in live.params]
    why = other_kind(live.optimizer, group, plain, states, parameters)
    if why is not None:
        match.mismatched.append(
            f"{fqn}: it was saved from another kind of optimizer: {why}; neither the group nor the state of its parameters can "
            "be loaded"
        )
    return why is None


# --- the state of parameters ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A part of the match that is taken as a whole or not at all (MATCHOPT-1)."""

    match: Context
    _bindings: int = field(init=False)
    _later: tuple[int, int, int] = field(init=False)
    _told: int = field(init=False)

    def __post_init__(self) -> None:
        self._bindings, self._told = len(self.match.bindings.by_fqn), len(self.match.mismatched)
        self._later = len(self.match.converted), len(self.match.checks), len(self.match.steps)

    @property
    def failed(self) -> bool:
        """Whether a mismatch was found since the trial began."""
        return len(self.match.mismatched) > self._told

    def fits(self, fqn: str) -> bool:
        """Whether all of it fits; if not, the matches of the state stored at `fqn` are dropped."""
        if not self.failed:
            return True
        self.match.bindings.drop_after(self._bindings)
        converted, checks, steps = self._later
        del self.match.converted[converted:], self.match.checks[checks:], self.match.steps[steps:]
        told = self.match.mismatched
        if not told[-1].startswith(f"{fqn}: "):
            told[-1] += f" (so all that is stored at {fqn} is left out)"
        return False

    def join(self) -> None:
        """Have the tensors that it has matched filled together or not at all, also if one of them turns out to share memory."""
        self.match.bindings.join_after(self._bindings)


def _entries(
    match: Context, live: Live, pairing: _Pairing, state: tree.Dict, of_another_kind: set[Hashable], fqn: str
) -> dict[Hashable, Build]:
    """The state of every parameter: as stored if it fits, otherwise as it is."""
    nodes = dict(match.stored.children(state))
    ours = {key: number for key, number in pairing.numbers.items() if number not in of_another_kind}
    kept = {key: number for key, number in ours.items() if optimizers.keeps(live.optimizer, live.params[number])}
    match.stateless += [f"{fqn}.state.{key}" for key in kept if key not in nodes]
    entries: dict[Hashable, Build] = {}
    left = live.params.keys() - ours.values()
    following = following_kinds(match, live, ours, nodes)
    for keys in _units(live, ours):
        trial, first = Trial(match), f"{fqn}.state.{keys[0]}"
        # If a part of the state differed between the saving ranks, the rest alone is useless.
        torn = any(match.left_below(f"{fqn}.state.{key}") for key in keys)
        stored = {key: kept[key] for key in keys if key in kept and key in nodes}
        # Parameters of which this rank holds and stored nothing are checked, too: so every rank decides alike.
        match.mismatched += [
            f"{fqn}.state.{key}: {why}"
            for key in (keys if any(key in nodes for key in keys) else ())
            if (why := misfit(match, live, key, ours[key], nodes.get(key), following)) is not None
        ]
        if stored and _has_more(live, ours[keys[0]], ours):
            others = "together with others of which nothing is stored"
            match.mismatched.append(f"{first}: here it is part of a flat parameter, {others}")
        made: dict[Hashable, Build] = {}
        if not (torn or trial.failed):
            made = {
                number: _entry(match, live, number, nodes[key], match.stored.find(key), f"{fqn}.state.{key}")
                for key, number in stored.items()
            }
        if not torn and trial.fits(first):
            entries |= made
        else:
            left = left | {ours[key] for key in keys}
            told = tuple(match.mismatched)
            match.mismatched += [
                f"{path}: it is part of the same flat parameter as {first}, so both are left out"
                for path in (f"{fqn}.state.{key}" for key in keys if key in nodes)
                if not any(line.startswith((f"{path}:", f"{path}.")) for line in told)
            ]
    entries |= {number: building.given(entry) for number, entry in live.state["state"].items() if number in left}
    own = {key: entry for key, entry in live.state["state"].items() if key not in live.params}
    for key, node in nodes.items():
        if key not in pairing.stored:  # of no parameter, such as a counter
            entries[key] = filled(match, own.pop(key, None), node, f"{fqn}.state.{key}")
    for key, entry in own.items():
        match.note_missing(f"{fqn}.state.{key}")
        entries[key] = building.given(entry)
    return entries


def _units(live: Live, ours: Mapping[Hashable, Hashable]) -> Iterable[list[Hashable]]:
    """The stored parameters, in lists of those that share one state here, as the parts of a flat parameter do."""
    units: dict[int, list[Hashable]] = {}
    for key, number in ours.items():
        parameter = live.params[number]
        owner = parameter.parameter if isinstance(parameter, FlatShard) else parameter
        units.setdefault(id(owner), []).append(key)
    return units.values()


def _has_more(live: Live, number: Hashable, ours: Mapping[Hashable, Hashable]) -> bool:
    """Whether a flat parameter here, of which `number` is a part, has parts that were not stored."""
    part = live.params[number]
    if not isinstance(part, FlatShard):
        return False
    others = live.params.keys() - ours.values()
    return any(isinstance(o := live.params[n], FlatShard) and o.parameter is part.parameter for n in others)


@dataclass(frozen=True, slots=True)
class _Like:
    """How to make a tensor that does not exist yet: on `device`, and sharded like `parameter`, or like the tensor that the
    first step makes at `path` (`first`).
    """

    device: torch.device | None = None
    parameter: torch.Tensor | FlatShard | None = None
    first: optimizer_layout.FirstStep | None = None
    path: tuple[Hashable, ...] = ()
    was: StridedView | None = None
    """The parameter as it is stored."""

    def below(self, key: Hashable) -> _Like:
        return self if self.first is None else replace(self, path=(*self.path, key))

    def tensor(self, match: Context, node: tree.Node) -> torch.Tensor | FlatShard | None:
        """The tensor whose sharding and strides the one stored at `node` gets."""
        if self.first is None or self.parameter is None or not isinstance(node, tree.Tensor):
            return self.parameter
        shape, shared = match.stored.place(node.fqn).shape, match.is_shared(node.fqn)
        # A number may stand beside DTensors; it becomes a DTensor only if it was stored as one.
        if math.prod(shape) == 1 and not isinstance(node, tree.MeshTensor):
            return self.parameter
        if shape != tuple(self.parameter.shape):
            made: torch.Tensor | None = optimizer_layout.like(node, shape, self.first, self.path, shared=shared)
            return self.parameter if made is None else made
        # If ranks held the parameter together but not this tensor, it was a plain tensor beside a DTensor.
        was_plain = not shared and self.was is not None and match.is_shared(self.was.fqn)
        return torch.empty(shape, dtype=self.parameter.dtype, device="meta") if was_plain else self.parameter


_ANYHOW = _Like()


def _entry(match: Context, live: Live, number: Hashable, node: tree.Node, was: StridedView | None, fqn: str) -> Build:
    """The state of one parameter, which is itself stored at `was`. It goes to the parameter's device, except for step counts,
    which torch keeps on the CPU, in a dtype of their own.
    """
    there = live.state["state"].get(number)
    if number not in live.params or not isinstance(node, tree.Dict):
        return filled(match, there, node, fqn)
    parameter, group = live.params[number], live.groups[number]
    steps_stay = not (group.get("capturable") or group.get("fused"))
    first = optimizer_layout.FirstStep(live.optimizer, group, parameter) if is_dtensor(parameter) else None
    device = None if is_meta(parameter) else parameter.device
    made = _Like(device, parameter, first, was=was)
    parts: dict[Hashable, Build] = {}
    match.low_bit = is_low_bit(live.optimizer)
    for key, child in match.stored.children(node):
        value = _item(there, key)
        asks = match.low_bit or (_is_low_bit_state(child) and is_ordinary(live.optimizer))
        if value is None and asks and key != "step" and shape_of(match, child) == tuple(parameter.shape):
            value = _state_like(match, live.optimizer, parameter, child, key)  # the class depends on what this rank holds
        like = made.below(key)
        if key == "step" and (steps_stay or not isinstance(child, tree.MeshTensor)):
            like = _Like(torch.device("cpu") if steps_stay else device)
        parts[key] = filled(match, value, child, f"{fqn}.{key}", like)
    match.low_bit = False
    return match.dict_of(node, parts)


def _is_low_bit_state(node: tree.Node) -> bool:
    return isinstance(node, tree.Composite) and (node.kind in BLOCKS or node.kind == ROWS)


def _state_like(match: Context, optimizer: Any, parameter: Any, node: tree.Node, key: Hashable) -> Any:
    """The state that `optimizer` makes for `parameter`, which may be on the meta device still."""
    if is_meta(parameter):
        device = match.device_of(
            next((one.device for one in (node, *tree.children(node)) if isinstance(one, tree.Tensor)), "cpu")
        )
        if is_dtensor(parameter):
            parameter = sharded_like(parameter, parameter.dtype, device)[1]
        else:
            parameter = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    return state_like(optimizer, parameter, key)


def filled(match: Context, live: Any, node: tree.Node, fqn: str, like: _Like = _ANYHOW) -> Build:
    """The stored value: tensors that `live` has at the same places are filled, and all others are made like `like`."""
    if isinstance(node, tree.Tensor | tree.Composite) and isinstance(live, torch.Tensor | FlatShard):
        build = match.tensor(live, node, fqn, replaceable=True, like=like.parameter, was=like.was)
        return build or building.given(live)
    if isinstance(node, tree.Dict):
        children = match.stored.children(node)
        parts = {key: filled(match, _item(live, key), child, f"{fqn}.{key}", like.below(key)) for key, child in children}
        return match.dict_of(node, parts)
    if isinstance(node, tree.Sequence):
        numbered = enumerate(node.items)
        made = [filled(match, _item(live, i), child, f"{fqn}.{i}", like.below(i)) for i, child in numbered]
        return building.sequence_of(node, made, known=type(live))
    return match.fresh(node, like.device, like.tensor(match, node), like.was)


def _item(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, list | tuple | collections.deque) and isinstance(key, int):
        return live[key] if key < len(live) else None
    return vars(live).get(key) if type(live) in NAMESPACES else None


def _load_optimizer(live: Live, state: dict[str, Any]) -> None:
    optimizer, params = live.optimizer, live.params
    if fsdp1.has_flat(optimizer, live.shards):
        state = fsdp1.joined(optimizer, live.shards, state)
        own = zip(optimizer.param_groups, state["param_groups"], strict=True)
        params = {number: p for group, ours in own for p, number in zip(group["params"], ours["params"], strict=True)}
    optimizer.load_state_dict(state)
    # torch casts floating-point state to the dtype of its parameter, and deep-copies the settings of groups.
    kept: Any = optimizers.state_of(optimizer)
    for number, entry in state["state"].items():
        _put_back(kept.get(params.get(number, number)), entry)
    for group, ours in zip(optimizer.param_groups, state["param_groups"], strict=False):
        _put_back(group, {key: value for key, value in ours.items() if key != "params"})


def _put_back(loaded: Any, ours: Any) -> None:
    """Put our strings and bytes back into `loaded`, and our tensors at the places at which it has tensors."""
    items = ours.items() if isinstance(ours, Mapping) else enumerate(ours) if isinstance(ours, list) else ()
    for key, value in items:
        there = _item(loaded, key)
        if isinstance(value, torch.Tensor) and isinstance(there, torch.Tensor):
            loaded[key] = value if value.device == there.device else value.to(there.device)
        elif isinstance(value, str | bytes):
            loaded[key] = value  # torch rebuilds every iterable from its items, which breaks these
        else:
            _put_back(there, value)
