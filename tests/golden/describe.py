"""What a value is, down to its bits, as JSON: what was saved, what was loaded, and what another reader finds compare by it."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterable

import numpy as np
import torch
from torch.distributed.tensor import DTensor

Described = None | bool | int | str | list["Described"] | dict[str, "Described"]

_MAPPINGS: dict[type, str] = {collections.OrderedDict: "OrderedDict", collections.Counter: "Counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "Size", set: "set", frozenset: "frozenset"}


def describe(value: object) -> Described:
    """`value` as JSON; modules and optimizers are described by their state_dict. TypeError for what no state can hold."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, torch.nn.Module):
        return describe(value.state_dict(keep_vars=True))
    if isinstance(value, torch.optim.Optimizer):
        return describe(value.state_dict())
    if isinstance(value, torch.Tensor):
        return tensor(value.full_tensor() if isinstance(value, DTensor) else value)
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": [*value.shape], "hex": value.tobytes().hex()}
    if isinstance(value, np.generic):
        return {"scalar": value.dtype.str, "hex": value.tobytes().hex()}
    if isinstance(value, dict):
        return mapping(_MAPPINGS.get(type(value), "dict"), ((describe(k), describe(v)) for k, v in value.items()))
    if type(value) in _SEQUENCES:
        return sequence(_SEQUENCES[type(value)], map(describe, value))  # type: ignore[call-overload]  # one of them
    return plain(value)


def plain(value: object) -> Described:
    """A number, bytes or a name of torch's."""
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else {"int": hex(value)}
    if isinstance(value, float):
        return {"float": np.float64(value).tobytes().hex()}
    if isinstance(value, complex):
        return {"complex": np.complex128(value).tobytes().hex()}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype | torch.device):
        return {"torch": type(value).__name__, "name": str(value).removeprefix("torch.")}
    raise TypeError(f"{value!r}")


def tensor(value: torch.Tensor) -> Described:
    bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex() if value.numel() else ""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"tensor": dtype, "shape": [*value.shape], "requires_grad": value.requires_grad, "hex": bits}


def mapping(kind: str, items: Iterable[tuple[Described, Described]]) -> Described:
    return {"mapping": kind, "items": [[key, value] for key, value in items]}


def sequence(kind: str, items: Iterable[Described]) -> Described:
    """Sets have no order: theirs is that of their members as JSON."""
    found = list(items)
    return {"sequence": kind, "items": sorted(found, key=json.dumps) if kind in ("set", "frozenset") else found}
