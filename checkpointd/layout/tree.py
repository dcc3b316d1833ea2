"""The state tree: the shape of what the user handed over, with tensors replaced by references to their FQNs.

Plain `None`, bool, int (64 bits), float and str stand for themselves; everything else is a tagged node. Nothing here can name a
class or a function, so decoding a tree can never run code.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

from checkpointd.errors import FormatError


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Tensor(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="T"):
    """A torch tensor stored under `fqn`."""

    fqn: str
    requires_grad: bool = False


class Array(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="A"):
    """A numpy array stored as the tensor `fqn`; `dtype` is numpy's name with byte order (`<u4`)."""

    fqn: str
    dtype: str


class NumpyScalar(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="N"):
    """A numpy scalar: `dtype` as in Array, `data` its bytes."""

    dtype: str
    data: bytes


class Bytes(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="B"):
    data: bytes


class BigInt(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="I"):
    """An integer outside 64 bits, in hexadecimal with sign."""

    hexadecimal: str


class Complex(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="C"):
    real: float
    imag: float


class Dict(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="D"):
    """A mapping with its order of keys. `kind` is its class: dict, OrderedDict, defaultdict (loads as dict) or Counter."""

    kind: Literal["dict", "OrderedDict", "Counter"]
    items: tuple[tuple[Node, Node], ...]


class Sequence(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="L"):
    kind: Literal["list", "tuple", "set", "frozenset", "Size"]
    items: tuple[Node, ...]


class TorchName(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="Y"):
    """A torch dtype, device, layout or memory format, by its name without `torch.`."""

    kind: Literal["dtype", "device"]
    name: str


Node: TypeAlias = (
    None | bool | int | float | str | Tensor | Array | NumpyScalar | Bytes | BigInt | Complex | Dict | Sequence | TorchName
)


def encode(tree: Node) -> bytes:
    """The tree as msgpack."""
    return _ENCODER.encode(tree)


def decode(data: bytes, key: str = "") -> Node:
    """The tree in `data`; FormatError where it is not one, or is nested too deeply to be read."""
    try:
        return _DECODER.decode(data)  # type: ignore[no-any-return]  # the union is recursive: msgspec types it as Any
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"the state tree in {key or 'an index'} cannot be read: {error}", key=key) from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Node)
