"""The state of torch's optimizers as it is stored: by the names of the parameters, if modules of the state name them."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch

from checkpointd_client.capture import objects
from checkpointd_client.capture.plain.containers import pairs_in
from checkpointd_client.sharding import fsdp1
from checkpointd_client.sharding.dtensor import FlatShard
from checkpointd_client.sharding.fsdp1 import Shards


def named(stored: Any, numbers: Mapping[Hashable, Any] | None, names: Mapping[int, str]) -> dict[Hashable, Any] | None:
    """`stored`, the result of `state_dict`, with names in place of the numbers of parameters.

    None if its form is unknown, if a parameter has no name, or if two have the same name: then it is stored with numbers.
    """
    if numbers is None:
        return None
    called = {number: names.get(id(parameter)) for number, parameter in numbers.items()}
    if None in called.values() or len(set(called.values())) != len(called):
        return None
    state = {called.get(number, number): entry for number, entry in stored["state"].items()}
    groups = [{**group, "params": [called[number] for number in group["params"]]} for group in stored["param_groups"]]
    return {**stored, "state": state, "param_groups": groups}


def numbered(optimizer: torch.optim.Optimizer, stored: Any, shards: Shards) -> dict[Hashable, Any] | None:
    """The parameters by their numbers in `stored`; None if it does not have the form of torch's optimizers."""
    try:
        if not isinstance(stored["state"], dict):
            return None
        pairs = zip(fsdp1.members(optimizer, shards), stored["param_groups"], strict=True)
        both = [pair for live, group in pairs for pair in zip(group["params"], live, strict=True)]
    except (TypeError, KeyError, ValueError):
        return None
    return dict(both)


def owners(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """By the id() of each value in the state of a parameter, the parameter that it belongs to."""
    found: dict[int, torch.Tensor] = {}
    for part in parts(optimizer):
        for parameter, entry in state_of(part).items():
            if isinstance(parameter, torch.Tensor):  # under other keys are counters and the like, of no parameter
                _note(entry, parameter, found)
    return found


def tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """All tensors in the state that the optimizer keeps, also under keys that are no parameters."""
    for part in parts(optimizer):
        yield from _tensors_in(state_of(part))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for _, child in pairs_in(value):
        yield from _tensors_in(child)


def of_no_parameter(optimizer: Any) -> dict[Hashable, Any]:
    """The optimizer's state under keys that are no parameters, such as a counter of its steps."""
    return {key: value for key, value in state_of(optimizer).items() if not isinstance(key, torch.Tensor)}


def parts(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The optimizers that keep the state: those inside `optimizer` if it consists of others, as torchtitan's does."""
    inside = getattr(optimizer, "optimizers", None)
    if isinstance(inside, list) and all(isinstance(one, torch.optim.Optimizer) for one in inside):
        return inside
    return [optimizer]


def owners_of(state: Mapping[Hashable, Any], numbers: Mapping[Hashable, Any]) -> dict[int, Any]:
    """The same for the `state` that `state_dict` made for an optimizer of flat parameters."""
    found: dict[int, Any] = {}
    for number, entry in state.items():
        if number in numbers:
            _note(entry, numbers[number], found)
    return found


def _note(value: Any, parameter: Any, found: dict[int, Any]) -> None:
    for _, child in pairs_in(value):
        found[id(child)] = parameter
        if not isinstance(child, torch.Tensor | FlatShard | str | bytes | int | float | None):
            _note(child, parameter, found)


# --- ZeroRedundancyOptimizer ----------------------------------------------------------------------------------------


def is_partitioned(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is a ZeroRedundancyOptimizer: each rank has the whole state of some of the parameters."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    return zero is not None and isinstance(optimizer, zero.ZeroRedundancyOptimizer)


def state_of(optimizer: Any) -> dict[Hashable, Any]:
    """The state that this rank keeps, by parameter, and by keys of the optimizer's own."""
    found: dict[Hashable, Any] = optimizer.optim.state if is_partitioned(optimizer) else optimizer.state
    return found


def keeps(optimizer: Any, parameter: Any) -> bool:
    """Whether this rank keeps state of `parameter`."""
    if type(parameter) is FlatShard:
        return bool(parameter.held.parts)
    return not is_partitioned(optimizer) or optimizer._param_to_rank[parameter] == optimizer.rank


def state_dict(optimizer: Any, fqn: str, shards: Shards) -> Any:
    """The optimizer's state_dict(). A ZeroRedundancyOptimizer gives the state of this rank, without gathering the others'. An
    optimizer of flat parameters gives the state of the original parameters.
    """
    if fsdp1.has_flat(optimizer, shards):
        found = fsdp1.state_dict(optimizer, shards, fqn)
        found["state"].update(of_no_parameter(optimizer))
        return found
    if not is_partitioned(optimizer):
        return objects.state_dict_of(optimizer, fqn)
    numbers: dict[Hashable, int] = {}
    groups = []
    for group in optimizer.param_groups:
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = [numbers.setdefault(parameter, len(numbers)) for parameter in group["params"]]
        groups.append(packed)
    state = {numbers[parameter]: entry for parameter, entry in state_of(optimizer).items() if parameter in numbers}
    return {"state": {**state, **of_no_parameter(optimizer)}, "param_groups": groups}
