"""What a value is, down to its bits, as JSON: what was saved, what was loaded, and what another reader finds compare by it."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import json
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from io import BytesIO, StringIO
from pathlib import PosixPath, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Described = None | bool | int | str | list["Described"] | dict[str, "Described"]

_MAPPINGS: dict[type, str] = {collections.OrderedDict: "OrderedDict", collections.Counter: "Counter"}
_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", torch.Size: "Size", set: "set", frozenset: "frozenset"}


_LIBRARY: dict[type, Callable[[Any], Iterable[object]]] = {
    **dict.fromkeys((PosixPath, PurePosixPath, PureWindowsPath), lambda path: [str(path)]),
    date: lambda day: [f"{day:%Y-%m-%d}"],
    time: lambda clock: [str(clock.replace(tzinfo=None)), clock.fold, clock.tzinfo],
    datetime: lambda moment: [str(moment.replace(tzinfo=None)).replace(" ", "T"), moment.fold, moment.tzinfo],
    timedelta: lambda span: [span.days, span.seconds, span.microseconds],
    timezone: lambda zone: [zone.utcoffset(None), None if str(zone) == str(timezone(zone.utcoffset(None))) else str(zone)],
    ZoneInfo: lambda zone: [zone.key],
    UUID: lambda name: [str(name), name.is_safe.name],
    Decimal: lambda number: [str(number)],
    Fraction: lambda number: [number.numerator, number.denominator],
    slice: lambda cut: [cut.start, cut.stop, cut.step],
    range: lambda numbers: [numbers.start, numbers.stop, numbers.step],
    bytearray: lambda data: [bytes(data)],
    BytesIO: lambda file: [file.getvalue(), file.tell()],
    StringIO: lambda file: [file.getvalue(), "", file.tell()],
}
"""The parts of a value, as docs/format/TREE.md tells them. Here a StringIO has `newline=""`, which only it knows itself."""


def describe(value: object) -> Described:
    """`value` as JSON; modules and optimizers are described by their state_dict. TypeError for what no state can hold."""
    if value is None or type(value) in (bool, str):
        return value  # type: ignore[return-value]  # one of the two
    if isinstance(value, torch.nn.Module):
        return describe(value.state_dict(keep_vars=True))
    if isinstance(value, torch.optim.Optimizer):
        return describe(value.state_dict())
    if isinstance(value, torch.Tensor):
        if isinstance(value, DTensor):
            return own_part(value) if hasattr(value._local_tensor, "__tensor_flatten__") else tensor(value.full_tensor())
        return tensor(value)
    if isinstance(value, np.ndarray):
        return {"array": value.dtype.str, "shape": [*value.shape], "hex": value.tobytes().hex()}
    if isinstance(value, np.generic):
        return {"scalar": value.dtype.str, "hex": value.tobytes().hex()}
    if isinstance(value, enum.Enum):
        cls = type(value)
        return {"member": f"{cls.__module__}.{cls.__qualname__}", "name": value.name, "value": describe(value.value)}
    if isinstance(value, SimpleNamespace | argparse.Namespace):
        return mapping(type(value).__name__, ((describe(k), describe(v)) for k, v in vars(value).items()))
    if isinstance(value, collections.deque):
        return {"deque": [describe(item) for item in value], "maxlen": value.maxlen}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        cls = type(value)
        return {
            "namedtuple": f"{cls.__module__}.{cls.__qualname__}",
            "items": [[k, describe(v)] for k, v in value._asdict().items()],
        }
    if type(value) in _LIBRARY:
        return {"library": type(value).__name__, "parts": [describe(part) for part in _LIBRARY[type(value)](value)]}
    if isinstance(value, dict):
        made = mapping(_MAPPINGS.get(type(value), "dict"), ((describe(k), describe(v)) for k, v in value.items()))
        return {**made, "attributes": describe(vars(value))} if getattr(value, "__dict__", None) else made
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
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return {"torch": type(value).__name__, "name": str(value).removeprefix("torch.")}
    raise TypeError(f"{value!r}")


def tensor(value: Any) -> Described:
    if value.layout is not torch.strided or value.is_nested or value.is_quantized or hasattr(value, "__tensor_flatten__"):
        kind, inner, facts = composite(value)
        return {
            "composite": kind,
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": [] if value.is_nested else [*value.shape],
            "requires_grad": value.requires_grad,
            "inner": [[name, describe(inner[name])] for name in sorted(inner)],
            "context": context(facts),
        }
    bits = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex() if value.numel() else ""
    dtype = str(value.dtype).removeprefix("torch.")
    return {"tensor": dtype, "shape": [*value.shape], "requires_grad": value.requires_grad, "hex": bits}


def own_part(value: DTensor) -> Described:
    """A sharded tensor of which every rank stores its own part."""
    sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return {
        "composite": "part",
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": [*value.shape],
        "requires_grad": value.requires_grad,
        "inner": [["local", tensor(value._local_tensor)]],
        "context": describe([[[*offsets], [*sizes]]]),
    }


_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def composite(value: Any) -> tuple[str, dict[str, torch.Tensor], object]:
    """The kind of a composite tensor, its inner tensors and its context, as docs/format/TREE.md tells them."""
    kind, found = str(value.layout).removeprefix("torch."), value.detach()
    if value.layout is torch.sparse_coo:
        return kind, {"indices": found._indices(), "values": found._values()}, {"is_coalesced": value.is_coalesced()}
    if value.layout in _COMPRESSED:
        return kind, {name: getattr(found, name)() for name in _COMPRESSED[value.layout]}, None
    if value.layout is torch.jagged:
        noted = {f"{name}_tensor": length for name, length in found._metadata_cache.items()}
        return kind, {"values": found.values(), "offsets": found.offsets(), **noted}, {"ragged_idx": found._ragged_idx}
    if value.is_nested:
        tables = (found._nested_tensor_size(), found._nested_tensor_strides(), found._nested_tensor_storage_offsets())
        names = ("sizes", "strides", "offsets")
        places = {name: table.tolist() for name, table in zip(names, tables, strict=True)}
        return "nested", {"buffer": found.values()}, places
    if value.is_quantized and value.qscheme() is torch.per_tensor_affine:
        return "quantized", {"integers": integers(found)}, {"scale": value.q_scale(), "zero_point": value.q_zero_point()}
    if value.is_quantized:
        channels = {"scales": found.q_per_channel_scales(), "zero_points": found.q_per_channel_zero_points()}
        return "quantized", {"integers": integers(found), **channels}, {"axis": value.q_per_channel_axis()}
    names, facts = value.__tensor_flatten__()
    return f"{type(value).__module__}:{type(value).__qualname__}", {name: getattr(value, name) for name in names}, facts


def integers(value: torch.Tensor) -> torch.Tensor:
    """The integers of a quantized tensor; of 4 bits, two in each byte, the first one in its low half."""
    found = value.int_repr()
    if value.dtype is not torch.quint4x2:
        return found
    return found.flatten()[: (value.numel() + 1) // 2]


def context(value: Any) -> Described:
    """What a composite tensor has beside its inner tensors. Enumerations, dataclasses and named tuples name their class."""
    named = f"{type(value).__module__}:{type(value).__qualname__}"
    if isinstance(value, enum.Enum):
        return {"named": named, "items": [["name", value.name]]}
    if dataclasses.is_dataclass(value):
        return {
            "named": named,
            "items": [[field.name, context(getattr(value, field.name))] for field in dataclasses.fields(value)],
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {"named": named, "items": [[name, context(item)] for name, item in value._asdict().items()]}
    if isinstance(value, dict):
        return mapping("dict", ((describe(key), context(item)) for key, item in value.items()))
    return describe(value)


def mapping(kind: str, items: Iterable[tuple[Described, Described]]) -> Described:
    return {"mapping": kind, "items": [[key, value] for key, value in items]}


def sequence(kind: str, items: Iterable[Described]) -> Described:
    """Sets have no order: theirs is that of their members as JSON."""
    found = list(items)
    return {"sequence": kind, "items": sorted(found, key=json.dumps) if kind in ("set", "frozenset") else found}
