"""Turns values that are not tensors into nodes of the state tree and back, bit for bit. No node can run code.

A value that would lose its class or its meaning is refused. The StateError says what to do instead.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Hashable

import numpy as np
import torch

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture import dtypes

Scalar = bool | int | float | complex | str | bytes | torch.dtype | torch.device | np.generic | None

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
                f"{fqn}: a string with a lone surrogate ({value!r:.80}) is not text that can be stored: "
                "store its bytes (os.fsencode for a file name)"
            ) from None
    return value


def _numpy_scalar(value: np.generic, fqn: str) -> tree.Node:
    if value.dtype.kind not in _NUMPY_SCALAR_KINDS:
        raise StateError(
            f"{fqn}: a numpy scalar of dtype {value.dtype} cannot be stored: convert it to a plain value (.item())"
        )
    return tree.NumpyScalar(value.dtype.str, value.tobytes())


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
}
SCALAR_TYPES: frozenset[type] = frozenset(_ENCODERS)


def is_scalar(value: object) -> bool:
    """Whether `value` is stored in the tree itself. Its class must match exactly: a subclass of str would load as str."""
    return type(value) in SCALAR_TYPES or isinstance(value, np.generic)


def encode(value: object, fqn: str) -> tree.Node:
    """The node for a scalar; StateError for a value that cannot be stored."""
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, fqn)
    if isinstance(value, np.generic):
        return _numpy_scalar(value, fqn)
    raise refused(value, fqn)


def decode(node: tree.Node) -> Scalar:
    """The scalar of `node`; FormatError for a node that no state can have."""
    try:
        return _decode(node)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"the state tree holds a value that cannot be read: {node!r:.200}: {error}") from error


def _decode(node: tree.Node) -> Scalar:
    match node:
        case tree.Bytes(data):
            return data
        case tree.BigInt(hexadecimal):
            return int(hexadecimal, 16)
        case tree.Complex(real, imag):
            return complex(real, imag)
        case tree.NumpyScalar(name, data):
            return _decode_numpy(name, data)
        case tree.TorchName("device", name):
            return torch.device(name)
        case tree.TorchName(_, name):
            return _decode_dtype(name)
        case tree.Tensor() | tree.Array() | tree.Dict() | tree.Sequence():
            raise TypeError("it is not a scalar")
        case _:
            return node


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
    """The node for the key of a dict at `fqn`: str, int, float, bool, None, or a tuple of those."""
    if type(key) is str:
        return _text(key, fqn)
    if type(key) is tuple:
        return tree.Sequence("tuple", tuple(key_node(part, fqn) for part in key))
    if key is None or type(key) in (int, float, bool):
        return encode(key, fqn)
    raise StateError(
        f"{fqn or 'the state'}: a dict key of type {type_name(key)} ({key!r:.80}) cannot be stored: "
        "use str, int, float, bool, None or a tuple of those"
    )


def key_text(key: object) -> str:
    """The key of a dict as a part of an FQN."""
    if type(key) is int and not _INT64_MIN <= key <= _UINT64_MAX:
        return hex(key)  # Python refuses to write very long integers in decimal
    if type(key) is tuple:
        return f"({', '.join(map(key_text, key))})"
    return key if type(key) is str else str(key)


def decode_key(node: tree.Node) -> Hashable:
    """The key of `node`."""
    if type(node) is str:
        return node
    if isinstance(node, tree.Sequence) and node.kind == "tuple":
        return tuple(decode_key(part) for part in node.items)
    return decode(node)


def type_name(value: object) -> str:
    """The class of `value` with its module, as messages name it."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def refused(value: object, fqn: str) -> StateError:
    """The error for a value that cannot be stored."""
    return StateError(f"{fqn or 'the state'}: {type_name(value)} cannot be stored: {_advice(value)}")


def _advice(value: object) -> str:
    if isinstance(value, enum.Enum):
        return "store its .value or .name"
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "a namedtuple would come back as a tuple: store ._asdict()"
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType):
        return "code is never stored: store a name and look the function up after loading"
    if isinstance(value, type | types.ModuleType):
        return "a class or module is code: store its name"
    if isinstance(value, np.ndarray):
        return "a subclass of ndarray would lose its class: store np.asarray(...) of it"
    for base in (str, int, float, bytes, dict, list, tuple, set):
        if isinstance(value, base):
            return f"it would come back as {base.__name__}: convert it with {base.__name__}(...)"
    return "give it state_dict() and load_state_dict(), or store plain values, dicts, lists and tensors"
