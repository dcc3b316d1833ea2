"""Matches objects that load themselves: modules, optimizers, generators, and everything with load_state_dict()."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from checkpointd.layout import tree
from checkpointd_client.capture import objects
from checkpointd_client.capture.dtypes import is_floating
from checkpointd_client.capture.rng import RngState
from checkpointd_client.restore.matching import data_loaders, schedulers
from checkpointd_client.restore.matching.context import Context, StepOrder
from checkpointd_client.restore.matching.dcp_forms import of_scheduler
from checkpointd_client.restore.matching.match_handed_out import handed_back
from checkpointd_client.restore.matching.match_module import match_module
from checkpointd_client.restore.matching.match_optimizer import match_optimizer
from checkpointd_client.restore.stored import Stored
from checkpointd_client.sharding.dtensor import dtensors_are_known


def match_object(match: Context, live: Any, node: tree.Node, fqn: str) -> bool:
    """Match one object. False if no object of its kind can be loaded, or if the stored node is of the wrong kind."""
    if isinstance(live, nn.Module):
        if isinstance(node, tree.Dict):
            match_module(match, match.modules.part(live, fqn), node, fqn)
        return isinstance(node, tree.Dict)
    if match.spread and isinstance(live, torch.Generator | RngState):  # all ranks would draw the same numbers
        match.per_rank_left.append(fqn)
        return True
    if isinstance(live, torch.Generator):
        return isinstance(node, tree.Tensor) and _generator(match, live, node, fqn)
    if isinstance(live, torch.optim.Optimizer):
        if isinstance(node, tree.Dict):
            match.optimizers.append(partial(_optimizer, match, live, node, fqn))
        return isinstance(node, tree.Dict)
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
        if shards is None and schedulers.optimizer_of(live) is not None:
            match.schedulers.append(partial(_scheduler, match, live, node, fqn))
            return True
        build = match.fresh(node) if shards is None else handed_back(match, shards, node, fqn)
        match.do(turn, build, objects.loading(live, fqn, live.load_state_dict))
        return True
    return False


def _optimizer(match: Context, live: torch.optim.Optimizer, node: tree.Dict, fqn: str) -> None:
    if not match_optimizer(match, live, node, fqn):
        match.note_kind(live, node, fqn)


def _scheduler(match: Context, live: Any, node: tree.Node, fqn: str) -> None:
    build = schedulers.regrouped(match, live, of_scheduler(node, live), fqn)
    if build is not None:
        match.do(StepOrder.OTHERS, build, objects.loading(live, fqn, live.load_state_dict))


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


def _generator(match: Context, live: torch.Generator, node: tree.Tensor, fqn: str) -> bool:
    build = match.tensor(live.get_state(), node, fqn, replaceable=True)
    if build is not None:
        match.do(StepOrder.GENERATORS, build, objects.loading(live, fqn, live.set_state))
    return True
