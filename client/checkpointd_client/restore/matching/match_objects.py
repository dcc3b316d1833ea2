"""Matches objects that load themselves: modules, optimizers, generators, and everything with load_state_dict()."""

from __future__ import annotations

import collections
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from checkpointd.layout import tree
from checkpointd_client.capture import objects
from checkpointd_client.capture.dtypes import is_floating
from checkpointd_client.capture.modules import StateModule
from checkpointd_client.capture.rng import RngState
from checkpointd_client.capture.tensor_kinds import four_bit
from checkpointd_client.capture.tensors import is_meta
from checkpointd_client.restore import building
from checkpointd_client.restore.building import Build
from checkpointd_client.restore.matching import data_loaders, schedulers
from checkpointd_client.restore.matching.context import Context, StepOrder
from checkpointd_client.restore.matching.match_handed_out import handed_back
from checkpointd_client.restore.matching.match_optimizer import match_optimizer
from checkpointd_client.restore.matching.materialise import note_left_on_meta
from checkpointd_client.restore.stored import Stored
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import FlatShard, dtensors_are_known


def match_object(match: Context, live: Any, node: tree.Node, fqn: str) -> bool:
    """Match one object. False if no object of its kind can be loaded, or if the stored node is of the wrong kind."""
    if isinstance(live, nn.Module):
        return isinstance(node, tree.Dict) and _module(match, match.modules.part(live, fqn), node, fqn)
    if isinstance(live, torch.Generator):
        return isinstance(node, tree.Tensor) and _generator(match, live, node, fqn)
    if isinstance(live, torch.optim.Optimizer):
        return isinstance(node, tree.Dict) and match_optimizer(match, live, node, fqn)
    if objects.is_stateful(live):
        of_one_rank = match.resharded and data_loaders.is_of_one_rank(live)
        if of_one_rank or match.left_below(fqn):  # loading only a part of its state would be worse than none
            match.per_rank_left.append(fqn)
            return True
        why = schedulers.misfit(live, node, match.stored, fqn) or data_loaders.misfit(live, node, fqn)
        if why is not None:
            match.mismatched.append(why)
            return True
        turn = StepOrder.RANDOMNESS if isinstance(live, RngState) else StepOrder.OTHERS
        shards = _shards_of(match, live, node, fqn)
        build = match.fresh(node) if shards is None else handed_back(match, shards, node, fqn)
        match.do(turn, build, objects.loading(live, fqn, live.load_state_dict))
        return True
    return False


def _shards_of(match: Context, live: Any, node: tree.Node, fqn: str) -> object | None:
    """The object's state_dict(), if it holds DTensors, as that of torch's get_state_dict() of a sharded model does.

    Such an object loads only DTensors, and only its own DTensors tell how they are sharded. Other objects are not asked: their
    state_dict() may start workers, and need not return their own memory. An object is asked only if every rank stored weights
    for it, since state_dict() may wait for all ranks: rank 0 alone may have gathered the weights.
    """
    return match.answers.of(live, fqn) if hands_out_weights(live, node, match.stored) else None


def hands_out_weights(live: object, node: tree.Node, stored: Stored) -> bool:
    """Whether `live`, an object of the user's own class, may hand out DTensors for the stored weights."""
    own_way = objects.is_stateful(live) and not isinstance(live, nn.Module | torch.optim.Optimizer | torch.Generator)
    return own_way and dtensors_are_known() and _holds_weights(stored, node)


def _holds_weights(stored: Stored, node: tree.Node) -> bool:
    if isinstance(node, tree.Tensor):
        place = stored.place(node.fqn)
        return bool(place.shape) and is_floating(place.dtype)
    return any(_holds_weights(stored, child) for child in tree.children(node))


def _module(match: Context, part: StateModule, node: tree.Dict, fqn: str) -> bool:
    """Fill the tensors of state_dict(), then pass it to load_state_dict(): parameters are not copied, hooks run as usual."""
    module, live = part.module, part.tensors
    stored = dict(match.stored.children(node))
    note_left_on_meta(match, module, live, fqn)
    extra: dict[Hashable, Build] = {}
    absent: set[str] = set()
    filled_before = len(match.bindings.by_fqn)
    for live_key, value in live.items():
        key = part.name(live_key)
        path = f"{fqn}.{key}"
        if key not in stored:
            if is_meta(value):
                match.mismatched.append(
                    f"{path}: it is on the meta device, and is not in the checkpoint: give it its value first"
                )
            else:
                _note_absent(match, value, path)
            absent.add(live_key)
        elif four_bit.is_derived(live_key, live):
            stored.pop(key)
        elif isinstance(value, torch.Tensor | FlatShard) and not live_key.endswith("_extra_state"):
            match.tensor(value, stored.pop(key), path)
        else:
            match.per_rank_left += match.left_below(path)
            extra[live_key] = match.fresh(stored.pop(key))
    children = match.stored.children(node)
    packed = {str(key) for key, one in children if isinstance(one, tree.Composite) and one.kind == four_bit.NAME}
    for left_over in stored:
        if not four_bit.is_part(str(left_over), packed):
            match.note_unexpected(f"{fqn}.{left_over}")
    if live and not extra and len(match.bindings.by_fqn) == filled_before:
        return True  # none of it is stored, or none of it fits
    if part.is_flat:
        extras = building.dict_of("dict", extra)
        match.do(StepOrder.MODULES, extras, objects.loading(module, fqn, lambda found: fsdp1.loaded(module, found)))
        return True

    def build() -> dict[str, Any]:
        # Absent values stay as they are; tensors are copied onto themselves, if their kind is one that torch can copy.
        filled = {
            key: value
            for key, value in live.items()
            if (key not in absent or isinstance(value, torch.Tensor)) and not (match.is_composite(value) or is_meta(value))
        }
        return _with_metadata(live, filled | {str(key): made() for key, made in extra.items()})

    options = {"strict": False} if objects.takes(module.load_state_dict, "strict") else {}
    match.do(StepOrder.MODULES, build, objects.loading(module, fqn, lambda filled: module.load_state_dict(filled, **options)))
    return True


def _note_absent(match: Context, value: object, path: str) -> None:
    if isinstance(value, nn.Parameter) and match.left_below(path):
        match.note_different(path)
    else:
        match.note_missing(path)


def _with_metadata(live: Mapping[str, Any], filled: Mapping[str, Any]) -> dict[str, Any]:
    """`filled` with the versions of the module's parts, which torch keeps as an attribute of the dict."""
    made = collections.OrderedDict(filled)
    if hasattr(live, "_metadata"):
        made._metadata = live._metadata  # type: ignore[attr-defined]  # torch does so, too
    return made


def _generator(match: Context, live: torch.Generator, node: tree.Tensor, fqn: str) -> bool:
    build = match.tensor(live.get_state(), node, fqn, replaceable=True)
    if build is not None:
        match.do(StepOrder.GENERATORS, build, objects.loading(live, fqn, live.set_state))
    return True
