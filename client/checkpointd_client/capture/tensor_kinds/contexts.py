"""The context of a composite tensor as nodes of the state tree, and back.

Invariants
  CONTEXT-1  Reading a context makes objects only of classes that the user allows and that this process has imported already.
"""

from __future__ import annotations

import dataclasses
import enum
import numbers
from collections.abc import Callable
from typing import Any

import torch

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture import scalars

_SEQUENCES: dict[type, Any] = {list: "list", tuple: "tuple", torch.Size: "Size"}
_MAKERS: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "Size": torch.Size}
_DEPTH_MAX = 20


def name_of(cls: type) -> str:
    """The name of a class as the state tree has it: its module and its qualified name."""
    return f"{cls.__module__}:{cls.__qualname__}"


def encode(value: object, fqn: str, allows: Callable[[type], bool], depth: int = 0) -> tree.Node:
    """The node for a context, or for a value in it. StateError, naming `fqn`, for a value that cannot be stored.

    `allows`: whether a class may be named.
    """
    if depth > _DEPTH_MAX:
        raise StateError(f"{fqn}: the context of this tensor is nested deeper than {_DEPTH_MAX} levels")
    below = depth + 1
    if scalars.is_scalar(value) and not isinstance(value, enum.Enum):
        return scalars.encode(value, fqn)
    if type(value) in _SEQUENCES and isinstance(value, list | tuple):
        return tree.Sequence(_SEQUENCES[type(value)], tuple(encode(item, fqn, allows, below) for item in value))
    if type(value) is dict:
        items = ((scalars.key_node(key, fqn), encode(item, fqn, allows, below)) for key, item in value.items())
        return tree.Dict("dict", tuple(items))
    fields = _fields(value)
    if fields is None:
        raise StateError(
            f"{fqn}: the context of this tensor holds a {scalars.type_name(value)}, which cannot be stored: only plain values, "
            "members of enumerations, dataclasses and namedtuples can"
        )
    if not allows(type(value)):
        raise StateError(
            f"{fqn}: the context of this tensor holds a {scalars.type_name(value)}, a class that may not be stored: pass it, "
            "too, in tensor_classes=[...] of the Checkpointer"
        )
    return tree.Named(name_of(type(value)), tuple((name, encode(item, fqn, allows, below)) for name, item in fields.items()))


def _fields(value: Any) -> dict[str, object] | None:
    """What makes `value` again; None if it is of no kind that can be named."""
    if isinstance(value, enum.Enum):
        return {"name": value.name}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: getattr(value, name) for name in value._fields}
    return None


def has_fractions(value: object) -> bool:
    """Whether a context holds a number that is no integer, such as a scale, which a class computes from its elements."""
    if isinstance(value, dict):
        return any(map(has_fractions, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_fractions, value))
    if dataclasses.is_dataclass(value):
        return any(map(has_fractions, (_fields(value) or {}).values()))
    return isinstance(value, numbers.Complex) and not isinstance(value, numbers.Integral)


def decode(node: tree.Node, find: Callable[[str], type]) -> Any:
    """The context in `node`. `find` gives the class of a name, or raises. FormatError for a node that no context can have."""
    if isinstance(node, tree.Dict):
        return {scalars.decode_key(key): decode(child, find) for key, child in node.items}
    if isinstance(node, tree.Sequence):
        if node.kind not in _MAKERS:
            raise FormatError(f"the context of a tensor holds a {node.kind}")
        return _MAKERS[node.kind]([decode(child, find) for child in node.items])
    if isinstance(node, tree.Named):
        return _named(find(node.name), {name: decode(child, find) for name, child in node.items})
    if isinstance(node, tree.Member):
        raise FormatError(f"the context of a tensor holds an enum member of {node.module}:{node.qualname} that was not allowed")
    return scalars.decode(node)


def _named(cls: Any, fields: dict[str, Any]) -> Any:
    known = issubclass(cls, enum.Enum) or dataclasses.is_dataclass(cls) or (issubclass(cls, tuple) and hasattr(cls, "_fields"))
    if not known:
        raise FormatError(f"the context of a tensor names {name_of(cls)}, which is no enumeration, dataclass or namedtuple")
    try:
        return cls[fields["name"]] if issubclass(cls, enum.Enum) else cls(**fields)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"the context of a tensor holds a {name_of(cls)} that cannot be made: {error!r}") from error
