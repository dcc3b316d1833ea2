"""The state of torch's optimizers as it is stored: by the names of its parameters, where modules of the state name them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch


def named(optimizer: torch.optim.Optimizer, stored: Any, names: Mapping[int, str]) -> dict[Hashable, Any] | None:
    """What state_dict() returned, with names in place of the numbers of parameters.

    None where it is of a shape of its own, or where a parameter has no name, or two have the same: then it stays as it is.
    """
    numbers = numbered(optimizer, stored)
    if numbers is None:
        return None
    called = {number: names.get(id(parameter)) for number, parameter in numbers.items()}
    if None in called.values() or len(set(called.values())) != len(called):
        return None
    state = {called.get(number, number): entry for number, entry in stored["state"].items()}
    groups = [{**group, "params": [called[number] for number in group["params"]]} for group in stored["param_groups"]]
    return {**stored, "state": state, "param_groups": groups}


def numbered(optimizer: torch.optim.Optimizer, stored: Any) -> dict[Hashable, torch.Tensor] | None:
    """The parameters by the numbers that `stored` gives them; None where it is not as torch's optimizers make it."""
    try:
        if not isinstance(stored["state"], dict):
            return None
        pairs = zip(optimizer.param_groups, stored["param_groups"], strict=True)
        both = [pair for live, group in pairs for pair in zip(group["params"], live["params"], strict=True)]
    except (TypeError, KeyError, ValueError):
        return None
    return dict(both)


def owners(optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
    """Whose state it is, by the identity of everything inside the state of each parameter."""
    found: dict[int, torch.Tensor] = {}
    for parameter, entry in optimizer.state.items():
        _note(entry, parameter, found)
    return found


def _note(value: Any, parameter: torch.Tensor, found: dict[int, torch.Tensor]) -> None:
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for child in children:
        found[id(child)] = parameter
        if not isinstance(child, torch.Tensor | str | bytes | int | float | None):
            _note(child, parameter, found)
