"""Turns values that are not tensors into nodes of the state tree and back, bit for bit. No node can run code.

A value that would lose its class or its meaning is refused. The StateError says what to do instead.
"""

from __future__ import annotations

import collections
import enum
import types
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from checkpointd.arguments import shown
from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture import dtypes
from checkpointd_client.capture.plain import classes, containers, values
from checkpointd_client.capture.plain.classes import StoredMember

_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1
_NUMPY_SCALAR_KINDS = "biufcMm"


def _integer(value: int, _fqn: str) -> tree.Node:
    return value if _INT64_MIN <= value <= _UINT64_MAX else tree.BigInt(format(value, "x"))


def _text(value: str, fqn: str) -> tree.Node:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise StateError(
                f"{fqn}: a string with a lone surrogate ({shown(value)}) is not text that can be stored: "
                "store its bytes (os.fsencode for a file name)"
            ) from None
    return value


def _numpy_scalar(value: np.generic, fqn: str) -> tree.Node:
    if value.dtype.kind not in _NUMPY_SCALAR_KINDS:
        raise StateError(
            f"{fqn}: a numpy scalar of dtype {value.dtype} cannot be stored: convert it to a plain value (.item())"
        )
    return tree.NumpyScalar(value.dtype.str, value.tobytes())


def _value(value: object, fqn: str) -> tree.Node:
    kind = values.KINDS[type(value)]
    try:
        parts = kind.parts(value)
    except ValueError as error:
        raise StateError(f"{fqn}: {type_name(value)} cannot be stored: {error}") from error
    return tree.LibraryValue(kind.cls.__name__, tuple(encode(part, fqn) for part in parts))  # type: ignore[arg-type]  # one of its kinds


def _member(value: enum.Enum, fqn: str) -> tree.Node:
    module, qualname = classes.named(type(value), fqn)
    try:
        own = _tuple_or_scalar(value._value_, fqn)
    except StateError:
        raise StateError(
            f"{fqn}: the value of {type_name(value)}.{value._name_} is a {type_name(value._value_)}, which cannot be stored: "
            "store its .name"
        ) from None
    return tree.Member(module, qualname, value._name_, own)


def _tuple_or_scalar(value: object, fqn: str) -> tree.Node:
    if type(value) is tuple:
        return tree.Sequence("tuple", tuple(_tuple_or_scalar(part, fqn) for part in value))
    return encode(value, fqn)


_ENCODERS: dict[type, Callable[..., tree.Node]] = {
    type(None): lambda value, _fqn: value,
    bool: lambda value, _fqn: value,
    float: lambda value, _fqn: value,
    int: _integer,
    str: _text,
    bytes: lambda value, _fqn: tree.Bytes(value),
    complex: lambda value, _fqn: tree.Complex(value.real, value.imag),
    torch.dtype: lambda value, _fqn: tree.TorchName("dtype", str(value).removeprefix("torch.")),
    torch.device: lambda value, _fqn: tree.TorchName("device", str(value)),
    torch.layout: lambda value, _fqn: tree.TorchName("layout", str(value).removeprefix("torch.")),
    torch.memory_format: lambda value, _fqn: tree.TorchName("memory_format", str(value).removeprefix("torch.")),
    **dict.fromkeys(values.KINDS, _value),
}
SCALAR_TYPES: frozenset[type] = frozenset(_ENCODERS)


def is_scalar(value: object) -> bool:
    """Whether `value` is stored in the tree itself. Its class must match exactly: a subclass of str would load as str."""
    return type(value) in SCALAR_TYPES or isinstance(value, np.generic | enum.Enum)


def encode(value: object, fqn: str) -> tree.Node:
    """The node for a scalar; StateError for a value that cannot be stored."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, fqn)
    if isinstance(value, np.generic):
        return _numpy_scalar(value, fqn)
    if isinstance(value, enum.Enum):
        return _member(value, fqn)
    raise refused(value, fqn)


def decode(node: tree.Node, *, known: type | None = None, stand_in: bool = False) -> Any:
    """The scalar of `node`; FormatError for a node that no state can have.

    The member of an enum is one of the class `known`, if that has the stored name, or of a class that is imported. If there is
    none: StateError; with `stand_in`, a StoredMember.
    """
    try:
        return _decode(node, known, stand_in)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, SyntaxError) as error:  # numpy parses names of dtypes
        raise FormatError(f"the state tree holds a value that cannot be read: {node!r:.200}: {error}") from error


def _decode(node: tree.Node, known: type | None, stand_in: bool) -> Any:
    match node:
        case tree.Bytes(data):
            return data
        case tree.BigInt(hexadecimal):
            return int(hexadecimal, 16)
        case tree.Complex(real, imag):
            return complex(real, imag)
        case tree.NumpyScalar(name, data):
            return _decode_numpy(name, data)
        case tree.TorchName(kind, name):
            return _decode_torch(kind, name)
        case tree.LibraryValue(kind, parts):
            return values.BY_NAME[kind].made(tuple(decode(part, stand_in=stand_in) for part in parts))
        case tree.Member():
            return _decode_member(node, known, stand_in)
        case tree.Tensor() | tree.Array() | tree.Dict() | tree.Sequence() | tree.Composite() | tree.Named():
            raise TypeError("it is not a scalar")
        case _:
            return node


def _decode_member(node: tree.Member, known: type | None, stand_in: bool) -> enum.Enum | StoredMember:
    value = _decode_tuple_or_scalar(node.value, stand_in)
    try:
        cls = classes.enum_class(node.module, node.qualname, known)
        found = classes.member(cls, node.name, value)
        if tree.encode(_tuple_or_scalar(found._value_, "")) != tree.encode(node.value):
            raise StateError(
                f"{node.module}.{node.qualname}.{node.name} had the value {shown(value)} when it was saved, and now it has "
                f"{shown(found._value_)}: load it with the class as it was"
            )
    except StateError:
        if stand_in:
            return StoredMember(f"{node.module}.{node.qualname}", node.name, value)
        raise
    return found


def _decode_tuple_or_scalar(node: tree.Node, stand_in: bool) -> Any:
    if isinstance(node, tree.Sequence) and node.kind == "tuple":
        return tuple(_decode_tuple_or_scalar(part, stand_in) for part in node.items)
    return _decode(node, None, stand_in)


def _decode_torch(kind: str, name: str) -> Any:
    if kind == "device":
        return torch.device(name)
    if kind == "dtype":
        return _decode_dtype(name)
    found = getattr(torch, name, None) if name in (_LAYOUTS if kind == "layout" else _MEMORY_FORMATS) else None
    if found is None:
        raise ValueError(f"this torch ({torch.__version__}) has no {kind} of that name")
    return found


_LAYOUTS = frozenset({"strided", "jagged", "_mkldnn", *(f"sparse_{kind}" for kind in ("coo", "csr", "csc", "bsr", "bsc"))})
_MEMORY_FORMATS = frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"})


def _decode_dtype(name: str) -> torch.dtype:
    if name not in dtypes.ALL:
        raise ValueError(f"this torch ({torch.__version__}) has no dtype of that name")
    return dtypes.ALL[name]


def _decode_numpy(name: str, data: bytes) -> np.generic:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_SCALAR_KINDS or dtype.itemsize != len(data):
        raise ValueError("dtype and size disagree")
    scalar: np.generic = np.frombuffer(data, dtype)[0]
    return scalar


def key_node(key: object, fqn: str) -> tree.Node:
    """The node for the key of a dict at `fqn`: a plain value that can be a key, or a tuple of those."""
    if type(key) is str:
        return _text(key, fqn)
    if type(key) is tuple:
        return tree.Sequence("tuple", tuple(key_node(part, fqn) for part in key))
    if is_scalar(key) and _is_key(key):
        return encode(key, fqn)
    raise StateError(
        f"{fqn or 'the state'}: a dict key of type {type_name(key)} ({shown(key)}) cannot be stored: "
        "use str, int, float, bool, None, another plain value or a tuple of those"
    )


def key_text(key: object) -> str:
    """The key of a dict as a part of an FQN."""
    if type(key) is str:
        return key
    if type(key) is int and not _INT64_MIN <= key <= _UINT64_MAX:
        return hex(key)  # Python refuses to write very long integers in decimal
    if type(key) is tuple:
        return f"({', '.join(map(key_text, key))})"
    if isinstance(key, enum.Enum):
        return _member_text(type(key).__qualname__, key._name_, key._value_)
    if isinstance(key, StoredMember):
        return _member_text(key.enum, key.name, key.value)
    return str(key)


def _member_text(cls: str, name: str | None, value: object) -> str:
    return f"{cls.rpartition('.')[2]}.{value if name is None else name}"


def decode_key(node: tree.Node, *, stand_in: bool = False) -> Hashable:
    """The key of `node`. A member of an enum that is not imported raises StateError; with `stand_in` it is a StoredMember."""
    if type(node) is str:
        return node
    if isinstance(node, tree.Sequence) and node.kind == "tuple":
        return tuple(decode_key(part, stand_in=stand_in) for part in node.items)
    key: Hashable = decode(node, stand_in=stand_in)
    if not _is_key(key):
        raise FormatError(f"the state tree has a {type_name(key)} as a key")
    return key


def _is_key(key: object) -> bool:
    if type(key) is slice or type(key) in values.MUTABLE:  # slices are hashable from Python 3.12 on
        return False
    try:
        hash(key)
    except TypeError:  # a signaling NaN of Decimal
        return False
    return True


def type_name(value: object) -> str:
    """The class of `value` with its module, as messages name it."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def refused(value: object, fqn: str) -> StateError:
    """The error for a value that cannot be stored."""
    return StateError(f"{fqn or 'the state'}: {type_name(value)} cannot be stored: {_advice(value)}")


def _advice(value: object) -> str:
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return "code is never stored: store a name and look the function up after loading"
    if isinstance(value, DataLoader):
        return "use torchdata's StatefulDataLoader, or leave the loader out and derive its position from the step"
    if isinstance(value, type | types.ModuleType):
        return "a class or module is code: store its name"
    if isinstance(value, np.ndarray):
        return "a subclass of ndarray would lose its class: store np.asarray(...) of it"
    for base in (*_BASES, *values.KINDS, *containers.NAMESPACES):
        if isinstance(value, base):
            return f"it would come back as {base.__name__}: convert it with {base.__name__}(...), or store plain values"
    return "give it state_dict() and load_state_dict(), or store plain values, dicts, lists and tensors"


_BASES: tuple[type, ...] = (str, int, float, bytes, dict, list, tuple, set, collections.deque)
