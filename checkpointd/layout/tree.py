"""The state tree: the structure of the user's state, with tensors replaced by references to their FQNs.

Plain `None`, bool, int (64 bits), float and str stand for themselves; everything else is a tagged node. Nothing here can name a
class or a function, so decoding a tree can never run code.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, TypeAlias

import msgspec

from checkpointd.errors import FormatError

DEPTH_MAX = 256
"""Levels of a tree, the root and the leaves included. A writer stays well below: it counts the user's containers alone."""


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Overlap(_Node, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a stored tensor lay that shared memory with others, or with itself, in a way that no alias can express.

    Such tensors are stored in full, each for itself. Memory that overlaps in just the same way may be filled with them again:
    the bytes agree where they meet. `offset` is in bytes from the lowest address of the `group`, `stride` in bytes.
    """

    group: int
    offset: int
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False


class Tensor(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="T"):
    """A torch tensor stored under `fqn`. `device` is the type that it was on (`cpu`, `cuda`), without the index."""

    fqn: str
    requires_grad: bool = False
    device: str = "cpu"
    overlap: Overlap | None = None


class MeshTensor(Tensor, frozen=True, array_like=True, forbid_unknown_fields=True, tag="P"):
    """A tensor that lay on a mesh of ranks, where nothing else in the state says how: optimizer state of another shape than its
    parameter.

    `mesh`: the size of each dimension of the mesh and its name, None where it has none. `placements`: for each of them the
    dimension of the tensor that was split over it, after it was split into so many pieces by the later ones; None where all
    ranks had the same.
    """

    mesh: tuple[tuple[int, str | None], ...] = ()
    placements: tuple[tuple[int, int] | None, ...] = ()


class Array(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="A"):
    """A numpy array stored as the tensor `fqn`; `dtype` is numpy's name with byte order (`<u4`).

    A dtype that torch lacks (`>f8`, `<M8[ns]`, `<U5`) is stored as uint8 with one more dimension: the bytes of an item.
    """

    fqn: str
    dtype: str
    overlap: Overlap | None = None


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
    """A torch dtype, by its name without `torch.`, or a device, as `str(device)` writes it."""

    kind: Literal["dtype", "device"]
    name: str


class StoredFileNode(_Node, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file that is stored as it is: an object of its own, and the plain file `name` once the attempt has committed.

    Its `placeholders` are filled with the bytes of tensors (uint8, one dimension): the first byte's place in the file, and the
    FQN. The bytes around the placeholders are those of the tensor `hollow`, in order. `sums`: where the CRC-32 of a
    placeholder's bytes stands, four bytes, the least significant first: the placeholder's number, and the first byte's place in
    the file, which is in no placeholder.
    """

    name: str
    size: int
    hollow: str
    placeholders: tuple[tuple[int, str], ...] = ()
    sums: tuple[tuple[int, int], ...] = ()


class FilesNode(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="F"):
    """What stands in place of a state where a rank stores files: file `i` is its object `file_name(rank, i)`.

    `at`: the directory that shows them, relative to the one in which the root lies.
    """

    at: str
    files: tuple[StoredFileNode, ...]


Node: TypeAlias = (
    bool
    | int
    | float
    | str
    | Tensor
    | MeshTensor
    | Array
    | NumpyScalar
    | Bytes
    | BigInt
    | Complex
    | Dict
    | Sequence
    | TorchName
    | None
)


def encode(tree: Node | FilesNode) -> bytes:
    """The tree as msgpack."""
    return _ENCODER.encode(tree)


def decode(data: bytes, key: str = "") -> Node:
    """The tree in `data`; FormatError where it is not one, is nested too deeply to be read, or is one of files."""
    if data.startswith(_FILES_HEAD):
        raise FormatError(
            f"{key or 'the index'} is of files, not of a state: load them with the program that they are for", key=key
        )
    try:
        root: Node = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the state tree in {key or 'an index'} cannot be read: {error}", key=key) from error
    if not _is_flat_enough(root):
        raise FormatError(f"the state tree in {key or 'an index'} is nested deeper than {DEPTH_MAX} levels", key=key)
    return root


def _is_flat_enough(root: Node) -> bool:
    """Level by level, since what walks a tree by calling itself must be able to rely on the answer."""
    level: list[Node] = [root]
    for _ in range(DEPTH_MAX):
        level = [child for node in level for child in children(node)]
        if not level:
            return True
    return False


def children(node: Node) -> Iterable[Node]:
    """The nodes directly below `node`; of a mapping keys and values."""
    return chain.from_iterable(node.items) if isinstance(node, Dict) else elements(node)


def items(node: Node) -> tuple[tuple[Node, Node], ...]:
    """The items of a mapping; of any other node none."""
    return node.items if isinstance(node, Dict) else ()


def elements(node: Node) -> tuple[Node, ...]:
    """The elements of a sequence; of any other node none."""
    return node.items if isinstance(node, Sequence) else ()


def files_of(data: bytes, key: str = "") -> FilesNode | None:
    """The files where there are files in place of a state, else None."""
    if not data.startswith(_FILES_HEAD):
        return None
    try:
        return _FILES_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"the files in {key or 'an index'} cannot be read: {error}", key=key) from error


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Node)
_FILES_DECODER = msgspec.msgpack.Decoder(FilesNode)
_FILES_HEAD = _ENCODER.encode(FilesNode("", ()))[:3]
"""An array of three whose first is the tag: no tree of a state begins like that."""
