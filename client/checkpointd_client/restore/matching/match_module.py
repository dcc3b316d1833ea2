"""Matches modules: their tensors are filled in place, and what only the module can place is handed to its load_state_dict().

Invariant
  OWNWAY-1  A part of a module with a load hook or a method of its own gets new tensors, as from torch.load(), unless it takes
      each of its tensors as it is. Else the hook would find the values that it keeps, swaps or merges overwritten already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from checkpointd.layout import tree
from checkpointd_client.capture import objects
from checkpointd_client.capture.dtypes import DTYPES, NAMES
from checkpointd_client.capture.modules import StateModule
from checkpointd_client.capture.optimizer_layout import like_without_memory
from checkpointd_client.capture.tensor_kinds import four_bit
from checkpointd_client.capture.tensors import PLAIN_TENSORS, is_meta
from checkpointd_client.restore import building
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.matching import module_trial
from checkpointd_client.restore.matching.context import Context, StepOrder
from checkpointd_client.restore.matching.materialise import note_left_on_meta
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import FlatShard, is_dtensor

_EXTRA = "_extra_state"


def match_module(match: Context, part: StateModule, node: tree.Dict, fqn: str) -> None:
    """Fill the tensors of state_dict(), then pass it to load_state_dict(): parameters are not copied, hooks run as usual.

    What the module renames, resizes or converts itself, it gets as new tensors.
    """
    module, live, stored = part.module, part.tensors, _stored(match, part, node)
    note_left_on_meta(match, module, live, fqn)
    packed = {key for key, one in stored.items() if isinstance(one, tree.Composite) and one.kind == four_bit.NAME}
    filled_before = len(match.bindings.by_fqn)
    versions = _Versions.of(part, node)
    own_way = _own_way(match, part, stored, versions, fqn)
    new: dict[Hashable, Build] = {
        key: match.fresh(stored.pop(key), like=_like(live.get(own_way.renamed.get(key, key)))) for key in own_way.takes
    }
    absent = set(own_way.fills)
    for key, value in live.items():
        path = f"{fqn}.{part.name(key)}"
        if key in new or key in absent:
            continue
        if key not in stored:
            _note_absent(match, value, path)
            absent.add(key)
        elif four_bit.is_derived(key, live):
            stored.pop(key)
        elif _is_tensor(key, value):
            match.tensor(value, stored.pop(key), path)
        else:
            match.per_rank_left += match.left_below(path)
            new[key] = match.fresh(stored.pop(key))
    for key in stored:
        if not four_bit.is_part(key, packed):
            match.note_unexpected(f"{fqn}.{part.name(key)}")
    if live and not new and len(match.bindings.by_fqn) == filled_before:
        return  # none of it is stored, or none of it fits
    if part.is_flat:
        extras = building.dict_of("dict", new)
        match.do(StepOrder.MODULES, extras, objects.loading(module, fqn, lambda found: fsdp1.loaded(module, found)))
        return

    def build() -> dict[str, Any]:
        # Absent tensors stay as they are, copied onto themselves if their kind is one that torch can copy.
        filled = {
            key: value
            for key, value in live.items()
            if key not in own_way.fills
            and (key not in absent or isinstance(value, torch.Tensor))
            and not (match.is_composite(value) or is_meta(value) or is_lazy(value))
        }
        given = filled | {str(key): made() for key, made in new.items()}
        if own_way.asked:  # as torch has them in a state_dict: some operations need tensors without gradients
            given = {key: value.detach() if type(value) in PLAIN_TENSORS else value for key, value in given.items()}
        return _with_versions(given, versions.here)

    options = {"strict": False} if objects.takes(module.load_state_dict, "strict") else {}
    match.do(StepOrder.MODULES, build, objects.loading(module, fqn, lambda filled: module.load_state_dict(filled, **options)))


def _stored(match: Context, part: StateModule, node: tree.Dict) -> dict[str, tree.Node]:
    """What is stored of the module, by the keys that its state_dict() has or would have for it."""
    own = {part.name(key): key for key in part.tensors}
    named = ((str(key), child) for key, child in match.stored.children(node))
    return {own.get(name) or part.names.raw(name): child for name, child in named}


def _is_tensor(key: str, value: object) -> bool:
    return isinstance(value, torch.Tensor | FlatShard) and not key.endswith(_EXTRA)


def _like(value: object) -> torch.Tensor | None:
    """The tensor whose sharding and dtype a new one gets."""
    return value if isinstance(value, torch.Tensor) and not is_lazy(value) else None


def _note_absent(match: Context, value: object, path: str) -> None:
    if is_meta(value):
        match.mismatched.append(f"{path}: it is on the meta device, and is not in the checkpoint: give it its value first")
    elif isinstance(value, nn.Parameter) and match.left_below(path):
        match.note_different(path)
    else:
        match.note_missing(path)


def _with_versions(found: dict[str, Any], versions: object) -> dict[str, Any]:
    """`found` with the versions of the module's parts, which torch keeps as an attribute of the dict."""
    made: dict[str, Any] = OrderedDict(found)
    if versions is not None:
        setattr(made, objects.METADATA, versions)
    return made


# --- what the module does its own way -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Versions:
    """The `_metadata` for load_state_dict(), as it was stored (`here`), and the paths of the parts that changed since."""

    here: object
    changed: frozenset[str]

    @classmethod
    def of(cls, part: StateModule, node: tree.Dict) -> _Versions:
        attributes = {} if node.attributes is None else building.value_of(node.attributes)
        was, own = attributes.get(objects.METADATA), getattr(part.tensors, objects.METADATA, None)
        if not isinstance(was, Mapping):
            return cls(own, frozenset())
        now = part.attributes.get(objects.METADATA, {})
        changed = frozenset(path for path, version in now.items() if was.get(path) != version)
        clean = {path: part.names.clean(path) for path in (own if isinstance(own, Mapping) else was)}
        return cls(OrderedDict((path, was[name]) for path, name in clean.items() if name in was), changed)

    def concern(self, name: str) -> bool:
        """Whether a part around the tensor `name` has changed its version."""
        return _is_in(self.changed, name)


def _is_in(paths: Collection[str], name: str) -> bool:
    """Whether the tensor `name` lies in one of the parts at `paths`."""
    return bool(paths) and ("" in paths or any(name[:at] in paths for at, letter in enumerate(name) if letter == "."))


@dataclass(frozen=True, slots=True)
class _OwnWay:
    """The stored keys that a module takes as new tensors, and its own keys that it fills from these or leaves as they are."""

    takes: Collection[str] = ()
    fills: Collection[str] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    """By stored key, that of the tensor here that gets its values."""
    asked: bool = False


def _own_way(match: Context, part: StateModule, stored: dict[str, tree.Node], versions: _Versions, fqn: str) -> _OwnWay:
    """Ask the module if what is stored differs from what it has, or if it has hooks or methods of its own (OWNWAY-1).

    Notes what it cannot load, and leaves that out.
    """
    live = part.tensors
    ways = (
        frozenset()
        if part.is_flat or not match.will_load
        else frozenset(map(part.names.clean, module_trial.own_ways(part.module)))
    )
    old = [key for key in stored if versions.concern(part.name(key)) and not key.endswith(_EXTRA)]
    resized = [key for key in stored if key not in old and _is_resized(match, live.get(key), stored[key])]
    absent = {key for key in live if key not in stored and not match.was_excluded(f"{fqn}.{part.name(key)}")}
    strange = [key for key in stored if key not in live]
    if not (old or resized or absent or strange or ways):
        return _OwnWay()
    verdict: module_trial.Verdict | str = "it is in FullyShardedDataParallel, whose parts cannot be converted one by one"
    offered: dict[str, Any] = {}
    if not part.is_flat:
        offered = {key: one for key, node in stored.items() if (one := _offer(match, key, live.get(key), node)) is not None}
        verdict = module_trial.ask(part.module, live, offered, versions.here)
        if isinstance(verdict, str) and resized:
            offered = {key: one for key, one in offered.items() if key not in resized}
            verdict = module_trial.ask(part.module, live, offered, versions.here)
    alike = [key for key in live if key in stored and key in offered and _is_plain(live[key]) and key not in (*old, *resized)]
    if isinstance(verdict, str):
        for key in old:
            del stored[key]
            match.mismatched.append(
                f"{fqn}.{part.name(key)}: it was stored by another version of its module, which cannot convert it: {verdict}"
            )
        if (resized or absent or strange) and ways:
            match.mismatched.append(f"{fqn}: it may load other names and shapes by itself, but cannot be asked: {verdict}")
        return _OwnWay([key for key in alike if _is_in(ways, part.name(key))], old, asked=True)
    changing = [
        path for path in ways if any(key not in verdict.as_they_are for key in alike if _is_in((path,), part.name(key)))
    ]
    takes = [key for key in (*old, *resized, *strange) if key in offered and key not in verdict.unexpected]
    takes += [key for key in alike if _is_in(changing, part.name(key))]
    fills = {key for key in absent if key not in verdict.missing}
    _note_converted(match, part, verdict, {*takes, *fills}, fqn)
    match.renamed.update({f"{fqn}.{part.name(old)}": f"{fqn}.{part.name(new)}" for old, new in verdict.renamed.items()})
    return _OwnWay(dict.fromkeys(takes), fills, verdict.renamed, asked=True)


def _is_plain(value: object) -> bool:
    return type(value) in PLAIN_TENSORS or (isinstance(value, torch.Tensor) and is_dtensor(value))


def _is_resized(match: Context, live: object, node: tree.Node) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(node, tree.Tensor):
        return False
    return is_lazy(live) or match.stored.place(node.fqn).shape != tuple(live.shape)


def _offer(match: Context, key: str, live: object, node: tree.Node) -> Any:
    """What stands for a stored value in a trial; None if nothing can, as for the extra state, which the module would keep."""
    if key.endswith(_EXTRA):
        return None
    if isinstance(node, tree.Tensor):
        place = match.stored.place(node.fqn)
        if isinstance(live, torch.Tensor) and not is_lazy(live) and tuple(live.shape) == place.shape:
            if is_dtensor(live):
                return like_without_memory(live.detach())
            if type(live) not in PLAIN_TENSORS:
                return live  # as the trial leaves it in its place
        return torch.empty(place.shape, dtype=DTYPES[place.dtype], device="meta")
    if isinstance(node, tree.Composite):
        return live if isinstance(live, torch.Tensor) else None
    return building.constant(node)() if building.is_scalar(node) else None


def _note_converted(match: Context, part: StateModule, verdict: module_trial.Verdict, keys: Iterable[str], fqn: str) -> None:
    """Note the tensors that the module itself would fill with numbers of another dtype."""
    for key in keys:
        was, now = verdict.converted.get(key, (None, None))
        if was is None or now is None or (match.cast and was.is_floating_point and now.is_floating_point):
            continue
        match.mismatched.append(
            f"{fqn}.{part.name(key)}: dtype {NAMES.get(was, was)} is stored, and {NAMES.get(now, now)} is there now"
        )
