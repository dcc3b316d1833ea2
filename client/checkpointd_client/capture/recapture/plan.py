"""How to capture a state again while its modules and optimizers are as they were.

Invariants
  CAPTUREPLAN-1  A capture by a plan equals what `state.capture` finds. If that is not certain, the plan raises Unfit.
  CAPTUREPLAN-2  A plan keeps no tensor, module, optimizer or dict of the user alive.
  CAPTUREPLAN-3  No Python code runs for a single tensor of a module or of an optimizer's state. Only the rest is walked: other
      objects, and what param_groups hold beside parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from checkpointd.layout import tree
from checkpointd_client.capture import objects, state_dicts
from checkpointd_client.capture.aliasing import address_of, extent, overlapping
from checkpointd_client.capture.dtypes import overlaps_itself
from checkpointd_client.capture.flatten import CLIENT_STATE, Flattener
from checkpointd_client.capture.leaves import Columns, Leaves
from checkpointd_client.capture.modules import modules_in
from checkpointd_client.capture.recapture import facts
from checkpointd_client.capture.recapture.facts import Found, Unfit, ValueFacts, picker
from checkpointd_client.capture.scalars import key_node
from checkpointd_client.capture.state import Captured, CheckedTensors, Walked, inspected, leaves_of
from checkpointd_client.capture.tensor_kinds.classes import ONLY_BUILT_IN, TensorClasses
from checkpointd_client.sharding.dtensor import LocalBox

T = TypeVar("T")
State = Mapping[str, object]
Pair = tuple[tree.Node, tree.Node]


@dataclass(slots=True)
class _Item:
    """One item of the state. `kind`: nn.Module, Optimizer, or None if it is walked at every save.

    `node`: the node of a module, or of the `state` of an optimizer. `ends`: the number of planned leaves up to its last one.
    `params`: by param group, the pair of its parameters. `names`: by param group and key, a list of str such as param_names
    with its pair.
    """

    kind: type | None
    node: tree.Node = None
    ends: int = 0
    params: list[Pair] = field(default_factory=list)
    names: dict[tuple[int, object], tuple[list[str], Pair]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recaptured:
    """A capture by a plan. `fresh`: the leaves of the items that were walked. `ends`: the number of fresh leaves before each
    item, and after the last one.
    """

    captured: Captured
    fresh: Leaves
    ends: list[int]


class CapturePlan:
    """How to capture a state again while its facts are those at `whole`. Unfit if this cannot be done."""

    def __init__(self, state: State, whole: Walked, classes: TensorClasses = ONLY_BUILT_IN) -> None:
        walk, captured = whole.walk, whole.captured
        self._classes = classes
        self._items = [_Item(_kind(value)) for value in state.values()]
        self._check_kinds(state, walk)
        found = self._look(state)
        self._facts = [one.facts for one in found]
        values = list(chain.from_iterable(one.values for one in found))
        self._values = _value_facts(self._kinds(), found, values)
        planned = self._planned(state, whole, found)
        _check_apart(set(range(len(walk.fqns))) - planned, whole)
        self._leaves = _LeafPlan(whole, planned, self._values.place)
        self._memory = _Memory.of(self._values.memory(values))
        self._names = {*captured.excluded, *(walk.fqns[i] for i in planned)}
        self._aliases, self._excluded = captured.aliases, captured.excluded
        self._empty = {span for span in whole.optimizer_spans if span[0] == span[1]}
        self._last: tuple[list[int], Columns, Columns] | None = None
        """The columns of the last capture with fresh leaves, behind what they depend on."""

    def _kinds(self) -> list[type]:
        return [item.kind for item in self._items if item.kind is not None]

    def _check_kinds(self, state: State, walk: Flattener) -> None:
        """Unfit if modules or optimizers lie deeper in the state."""
        modules = [id(value) for value in state.values() if isinstance(value, nn.Module)]
        own = [id(value) for value, item in zip(state.values(), self._items, strict=True) if item.kind is torch.optim.Optimizer]
        if [id(module) for _, module in modules_in(dict(state), "")] != modules or list(map(id, walk.optimizers)) != own:
            raise Unfit

    def _look(self, state: State) -> list[Found]:
        """The facts and values of each module and optimizer. Unfit if an item is of another kind now."""
        found = []
        for value, item in zip(state.values(), self._items, strict=True):
            if _kind(value) is not item.kind:
                raise Unfit
            if isinstance(value, nn.Module):
                found.append(facts.of_module(value))
            elif isinstance(value, torch.optim.Optimizer):
                found.append(facts.of_optimizer(value))
        return found

    def _planned(self, state: State, whole: Walked, found: list[Found]) -> set[int]:
        """The positions of the tensors in modules and in the state of optimizers. Notes the items' nodes and leaves."""
        walk, planned, live = whole.walk, set[int](), iter(found)
        for (name, value), item, pair, begin, end in zip(
            state.items(), self._items, _pairs_of(whole.captured), walk.begins[:-1], walk.begins[1:], strict=True
        ):
            if item.kind is nn.Module:
                item.node = pair[1]
                next(live)
                planned.update(range(begin, end))
            elif isinstance(value, torch.optim.Optimizer):
                count = sum(isinstance(one, torch.Tensor) for one in facts.state_values(next(live)))
                of_state = [fqn.startswith(f"{name}.state.") for fqn in walk.fqns[begin:end]]
                if of_state != [True] * count + [False] * (end - begin - count):
                    raise Unfit
                _note_groups(item, pair[1], value)
                planned.update(range(begin, begin + count))
            item.ends = sum(position in planned for position in whole.positions)
        return planned

    def recaptured(self, state: State, client_state: State | None) -> Recaptured:
        """Capture the state again. Unfit if its modules or optimizers are not as they were."""
        Flattener.check_names(state)
        found = self._look(state)
        if [one.facts for one in found] != self._facts or state_dicts.refused(state) is not None:
            raise Unfit
        with torch._C.DisableTorchFunction():
            planned = self._leaves.made(self._values.memory(list(chain.from_iterable(one.values for one in found))))
        walk, cuts = _Walk(self._classes), [0]
        pairs = []
        for (name, value), item in zip(state.items(), self._items, strict=True):
            pairs.append(walk.pair(name, value, item))
            cuts.append(len(walk.fqns))
        client = walk.client_node(client_state)
        fresh = self._fresh(walk)
        leaves = self._joined(planned, fresh, cuts)
        root = tree.Dict("dict", (("state", tree.Dict("dict", tuple(pairs))), (CLIENT_STATE, client)))
        return Recaptured(Captured(leaves, self._aliases, root, self._excluded), fresh, cuts)

    def _joined(self, planned: Sequence[torch.Tensor], fresh: Leaves, cuts: list[int]) -> Leaves:
        """All leaves in the order of the state. `cuts`: the number of fresh leaves before each item, and after the last one."""
        if not fresh:
            return Leaves(self._leaves.columns, planned)
        ends = [0, *(item.ends for item in self._items)]

        def joined(known: Sequence[T], new: Sequence[T]) -> list[T]:
            pieces = ((known[ends[i] : ends[i + 1]], new[cuts[i] : cuts[i + 1]]) for i in range(len(cuts) - 1))
            return [*chain.from_iterable(chain.from_iterable(pieces)), *new[cuts[-1] :]]

        if self._last is None or self._last[:2] != (cuts, fresh.columns):
            one, two = self._leaves.columns, fresh.columns
            columns = Columns(
                joined(one.fqns, two.fqns),
                joined(one.dtypes, two.dtypes),
                joined(one.optimizer_only, two.optimizer_only),
                joined(one.parts, two.parts),
            )
            self._last = cuts, two, columns
        return Leaves(self._last[2], joined(planned, fresh.tensors))

    def _fresh(self, walk: Flattener) -> Leaves:
        """The leaves of the items that were walked. Unfit if they share names or memory with the rest of the state."""
        fqns = walk.fqns
        if walk.held or len(set(fqns)) != len(fqns) or not self._names.isdisjoint(fqns):
            raise Unfit
        with torch._C.DisableTorchFunction():
            found = inspected(walk)
            if _shares(found) or self._memory.overlaps(found.starts, found.ends):
                raise Unfit
            return leaves_of(found, {}, self._empty, [])


def _kind(value: object) -> type | None:
    if not isinstance(value, nn.Module | torch.optim.Optimizer) or not objects.is_object(value):
        return None
    return nn.Module if isinstance(value, nn.Module) else torch.optim.Optimizer


def _value_facts(kinds: list[type], found: list[Found], values: list[Any]) -> ValueFacts:
    """Unfit if an optimizer has a parameter that no module has: then its state has other names."""
    noted, in_modules, parameters = list[bool](), list[bool](), set[int]()
    for kind, one in zip(kinds, found, strict=True):
        is_module = kind is nn.Module
        if is_module:
            parameters.update(id(value) for value in one.values if isinstance(value, nn.Parameter))
        noted += facts.persistent(one) if is_module else [True] * len(one.values)
        in_modules += [is_module] * len(one.values)
    for kind, one in zip(kinds, found, strict=True):
        if kind is not nn.Module and not parameters.issuperset(map(id, facts.parameters(one))):
            raise Unfit
    return ValueFacts(values, noted, in_modules)


def _pairs_of(captured: Captured) -> tuple[Pair, ...]:
    """The pairs of the state in the tree."""
    state = captured.tree.items[0][1] if isinstance(captured.tree, tree.Dict) else None
    if not isinstance(state, tree.Dict):
        raise Unfit
    return state.items


def _note_groups(item: _Item, node: tree.Node, optimizer: torch.optim.Optimizer) -> None:
    match node:
        case tree.Dict("dict", (("state", of_state), ("param_groups", tree.Sequence("list", groups)))):
            item.node = of_state
        case _:
            raise Unfit
    for i, (group, stored) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        if not isinstance(stored, tree.Dict) or stored.items[-1][0] != "params":
            raise Unfit
        item.params.append(stored.items[-1])
        others = ((key, value) for key, value in group.items() if key != "params")
        for (key, value), pair in zip(others, stored.items[:-1], strict=True):
            if type(value) is list and {str}.issuperset(map(type, value)):
                item.names[i, key] = list(value), pair


def _check_apart(fresh: set[int], whole: Walked) -> None:
    """Unfit if a tensor that is walked at every save shares memory with others, or is sharded."""
    owners = {owner for owner, _ in whole.aliases.values()}
    if not fresh.isdisjoint({*whole.found.held, *whole.walk.optimizer_only, *whole.aliases, *owners}):
        raise Unfit
    if not whole.overlapping.isdisjoint(whole.walk.fqns[i] for i in fresh):
        raise Unfit


def _shares(found: CheckedTensors) -> bool:
    """Whether one of the tensors shares memory with another one or with itself."""
    return bool(overlapping(found.starts, found.ends)) or any(overlaps_itself(found.live[i]) for i in found.strided)


class _Walk(Flattener):
    """A walk over what is walked at every save."""

    def __init__(self, classes: TensorClasses) -> None:
        super().__init__(exclude_frozen_parameters=False, classes=classes)

    def _module(self, wrapped: nn.Module, fqn: str) -> tree.Node:
        raise Unfit

    def _optimizer(self, optimizer: torch.optim.Optimizer, fqn: str) -> tree.Node:
        raise Unfit

    def pair(self, name: str, value: Any, item: _Item) -> Pair:
        """The pair of an item in the tree."""
        if item.kind is nn.Module:
            return _key(name), item.node
        if item.kind is None:
            return self._pairs([(name, value)], "")[0]
        # As many containers are around a value in a param group, and no value may be nested too deeply.
        around = {-1, -2, -3, -4}
        self._path |= around
        groups = tuple(self._group(group, f"{name}.param_groups.{i}", i, item) for i, group in enumerate(value.param_groups))
        self._path -= around
        return _key(name), tree.Dict("dict", (("state", item.node), ("param_groups", tree.Sequence("list", groups))))

    def _group(self, group: Mapping[str, Any], fqn: str, i: int, item: _Item) -> tree.Node:
        pairs: list[Pair] = []
        for key, value in group.items():
            if key == "params":
                continue
            names = item.names.get((i, key))
            if names is not None and type(value) is list and {str}.issuperset(map(type, value)) and value == names[0]:
                pairs.append(names[1])
            else:
                pairs += self._pairs([(key, value)], fqn)
        return tree.Dict("dict", (*pairs, item.params[i]))


def _key(name: str) -> tree.Node:
    return key_node(name, "")


@dataclass(frozen=True, slots=True)
class _Memory:
    """The memory of planned tensors: the lowest addresses in order, and up to each the highest end."""

    starts: NDArray[np.uint64]
    reach: NDArray[np.uint64]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Memory:
        spans = sorted(
            (start, start + extent(tensor)) for tensor in tensors if tensor.numel() for start in (address_of(tensor),)
        )
        starts, ends = np.array([span[0] for span in spans], np.uint64), np.array([span[1] for span in spans], np.uint64)
        return cls(starts, np.maximum.accumulate(ends))

    def overlaps(self, starts: Sequence[int], ends: Sequence[int]) -> bool:
        """Whether an interval that is not empty overlaps this memory."""
        first, last = np.array(starts, np.uint64), np.array(ends, np.uint64)
        first, last = first[first < last], last[first < last]
        below = np.searchsorted(self.starts, last, "left")
        return bool((self.reach[below[below > 0] - 1] > first[below > 0]).any())


class _LeafPlan:
    """How to make the leaves of planned tensors from their memory."""

    def __init__(self, whole: Walked, planned: set[int], place: Mapping[int, int]) -> None:
        walk, leaves = whole.walk, whole.captured.leaves
        chosen = [(k, i) for k, i in enumerate(whole.positions) if i in planned]
        self.columns = leaves.columns.at([k for k, _ in chosen])
        if any(id(walk.sharded.get(i, walk.tensors[i])) not in place for i in planned):
            raise Unfit
        parts = self.columns.parts
        self._empty = [leaves.tensors[k] for (k, _), part in zip(chosen, parts, strict=True) if _is_empty(part)]
        views = [(part, i) for (_, i), part in zip(chosen, parts, strict=True) if not _is_empty(part)]
        self._sources = picker([place[id(walk.sharded.get(i, walk.tensors[i]))] for _, i in views])
        cuts = [_cuts(part, tuple(walk.tensors[i].shape)) if part is not None else [] for part, i in views]
        at, total = list(range(len(views))), len(views)
        self._rounds = []
        for depth in range(max(map(len, cuts), default=0)):
            cut = [k for k in range(len(views)) if len(cuts[k]) > depth]
            dims, starts, sizes = zip(*(cuts[k][depth] for k in cut), strict=True)
            self._rounds.append((picker([at[k] for k in cut]), dims, starts, sizes))
            for k in cut:
                at[k], total = total, total + 1
        of_view, of_empty = iter(at), count(total)
        self._order = picker([next(of_empty) if _is_empty(part) else next(of_view) for part in parts])

    def made(self, memory: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The tensors of the leaves, in the order of the state."""
        tensors = list(self._sources(memory))
        with torch.no_grad():
            for picked, dims, starts, sizes in self._rounds:
                tensors.extend(list(map(torch.Tensor.narrow, picked(tensors), dims, starts, sizes)))
        tensors.extend(self._empty)
        return self._order(tensors)


def _is_empty(part: LocalBox | None) -> bool:
    """Whether the leaf of `part` has memory of its own, of no element."""
    return part is not None and 0 in part.box.sizes


def _cuts(part: LocalBox, shape: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """How to narrow a local tensor of `shape` to `part`: dimensions, starts and sizes."""
    if type(part) is not LocalBox or part.row is not None:
        raise Unfit
    boxes = enumerate(zip(part.at, part.box.sizes, shape, strict=True))
    return [(dim, start, size) for dim, (start, size, whole) in boxes if size != whole]
