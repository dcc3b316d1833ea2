"""The state tree: the structure of the user's state, with tensors replaced by references to their FQNs.

Plain `None`, bool, int (64 bits), float and str stand for themselves; everything else is a tagged node. Only enum members,
named tuples, and composite tensors with what lies beside their inner tensors name a class, and no node names a function.
Decoding a tree imports nothing and never runs code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final, Literal, TypeAlias

import msgspec

from checkpointd.errors import FormatError

DEPTH_MAX = 256
"""The most levels of a tree, with root and leaves. The client allows fewer levels of the user's containers."""


class _Node(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    pass


class Overlap(_Node, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The place of a tensor that shared memory with other tensors, or with itself, in a way that no alias can express.

    Each of these tensors is stored in full. A load may fill memory that overlaps in the same way, since shared bytes are equal
    in all of them. `offset` is in bytes from the lowest address of the `group`, `stride` in bytes.
    """

    group: int
    offset: int
    stride: tuple[int, ...]
    conjugate: bool = False
    negative: bool = False


class Tensor(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="T"):
    """A torch tensor stored under `fqn`. `device` is the type of its device (`cpu`, `cuda`), without the index.

    `stride`: its strides in elements if its elements filled their memory in another order than row-major; None if row-major.
    The parts of a sharded tensor had their dimensions in this order, too. The elements are stored row-major in any case.
    """

    fqn: str
    requires_grad: bool = False
    device: str = "cpu"
    overlap: Overlap | None = None
    stride: tuple[int, ...] | None = None


class MeshTensor(Tensor, frozen=True, array_like=True, forbid_unknown_fields=True, tag="P"):
    """A tensor that was distributed over a mesh in a way that only this node records, such as optimizer state whose shape
    differs from its parameter's.

    `mesh`: the size and the name of each mesh dimension; the name is None if it has none. `placements`: one entry for each mesh
    dimension, None if the ranks along it had the same. Otherwise the entry is the tensor dimension that was split over it, and
    into how many pieces the later mesh dimensions had split that dimension before.
    """

    mesh: tuple[tuple[int, str | None], ...] = ()
    placements: tuple[tuple[int, int] | None, ...] = ()


class Array(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="A"):
    """A numpy array stored as the tensor `fqn`; `dtype` is numpy's name with byte order (`<u4`).

    A dtype that torch lacks (`>f8`, `<M8[ns]`, `<U5`) is stored as uint8 with one more dimension for the bytes of an item.
    `stride`: as in Tensor, for a dtype that torch has.
    """

    fqn: str
    dtype: str
    overlap: Overlap | None = None
    stride: tuple[int, ...] | None = None


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
    """A mapping with its order of keys. `kind` is its class: dict, OrderedDict, defaultdict (loads as dict) or Counter.

    A SimpleNamespace and an argparse.Namespace are mappings of their attributes (NAMESPACES). `attributes`: a Dict of the
    attributes that a mapping has beside its items, such as the `_metadata` of a module's state_dict; None if it has none.
    """

    kind: Literal["dict", "OrderedDict", "Counter", "SimpleNamespace", "Namespace"]
    items: tuple[tuple[Node, Node], ...]
    attributes: Dict | None = None


NAMESPACES: Final = ("SimpleNamespace", "Namespace")
"""The kinds of Dict whose keys are attributes."""


class Sequence(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="L"):
    kind: Literal["list", "tuple", "set", "frozenset", "Size"]
    items: tuple[Node, ...]


class Composite(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="W"):
    """A tensor whose elements lie in other tensors, its inner tensors (`inner`, by name), such as a sparse or a quantized one.

    `kind`: `sparse_coo`, `sparse_csr`, `sparse_csc`, `sparse_bsr`, `sparse_bsc`, `jagged`, `nested`, `quantized`, or the module
    and the name of a class of tensors, as `torchao.optim.subclass_8bit:OptimState8bit`. A load compares it with a list of
    classes that the user allows; it never imports one. `shape` and `dtype` are those of the whole tensor; a nested one has the
    shape `()`. `context`: everything else that its kind needs to make it again, as plain values and Named values.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: str
    inner: tuple[tuple[str, Node], ...]
    context: Node = None
    requires_grad: bool = False


class Named(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="O"):
    """A value in the context of a Composite: a member of an enumeration (`items` has its name under `name`), or the fields of a
    dataclass or a namedtuple. `name`: the module and the name of its class, which the user must allow, too.
    """

    name: str
    items: tuple[tuple[str, Node], ...]


class Deque(Sequence, frozen=True, array_like=True, forbid_unknown_fields=True, tag="Q"):
    kind: Literal["deque"]  # type: ignore[assignment]  # no other sequence has it
    items: tuple[Node, ...]
    maxlen: int | None = None


class NamedTuple(Sequence, frozen=True, array_like=True, forbid_unknown_fields=True, tag="U"):
    """A named tuple of the class `qualname` of `module`, whose fields have the names `fields`."""

    kind: Literal["namedtuple"]  # type: ignore[assignment]  # no other sequence has it
    items: tuple[Node, ...]
    module: str = ""
    qualname: str = ""
    fields: tuple[str, ...] = ()


class Member(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="E"):
    """A member of the enum class `qualname` of `module`, with its value. A combination of flags may have no name."""

    module: str
    qualname: str
    name: str | None
    value: Node


class TorchName(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="Y"):
    """A torch dtype, layout or memory format by its name without `torch.`, or a device, as `str(device)` writes it."""

    kind: Literal["dtype", "device", "layout", "memory_format"]
    name: str


class LibraryValue(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="V"):
    """A value of a class of Python's library. The kind is the name of the class; docs/format/TREE.md has the parts of each."""

    kind: Literal[
        "PurePosixPath",
        "PosixPath",
        "PureWindowsPath",
        "date",
        "time",
        "datetime",
        "timedelta",
        "timezone",
        "ZoneInfo",
        "UUID",
        "Decimal",
        "Fraction",
        "slice",
        "range",
        "bytearray",
        "BytesIO",
        "StringIO",
    ]
    parts: tuple[Node, ...]


class StoredFileNode(_Node, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A file that is stored as one object, and shown as the plain file `name` once the attempt has committed.

    `placeholders`: the byte of the file at which each begins, and the FQN of the tensor (uint8, one dimension) that fills it.
    The tensor `hollow` holds the bytes around the placeholders, in order. `sums`: the number of a placeholder, and the byte of
    the file at which the CRC-32 of its bytes begins (four bytes, little-endian, outside the placeholders).
    """

    name: str
    size: int
    hollow: str
    placeholders: tuple[tuple[int, str], ...] = ()
    sums: tuple[tuple[int, int], ...] = ()


class FilesNode(_Node, frozen=True, array_like=True, forbid_unknown_fields=True, tag="F"):
    """The root of the tree of a rank that stores files instead of a state. File `i` is the object `file_name(rank, i)`.

    `at`: the directory that shows the files, relative to the directory in which the root lies.
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
    | Deque
    | NamedTuple
    | Member
    | TorchName
    | LibraryValue
    | Composite
    | Named
    | None
)


def encode(tree: Node | FilesNode) -> bytes:
    """The tree as msgpack."""
    return _ENCODER.encode(tree)


def decode(data: bytes, key: str = "") -> Node:
    """The tree in `data`. Raises FormatError if `data` is not a tree, is nested too deeply, or describes files."""
    if data.startswith(_FILES_HEAD):
        raise FormatError(
            f"{key or 'the index'} describes files, not a state: load them with the program that they are for", key=key
        )
    try:
        root: Node = _DECODER.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the state tree in {key or 'an index'} cannot be read: {error}", key=key) from error
    if not _is_flat_enough(root):
        raise FormatError(f"the state tree in {key or 'an index'} is nested deeper than {DEPTH_MAX} levels", key=key)
    return root


def _is_flat_enough(root: Node) -> bool:
    """Whether the tree has at most DEPTH_MAX levels. Goes level by level, since recursion could fail on a deep tree."""
    level: list[Node] = [root]
    for _ in range(DEPTH_MAX):
        level = [child for node in level for child in children(node)]
        if not level:
            return True
    return False


def children(node: Node) -> Iterable[Node]:
    """The nodes directly below `node`: the elements of a sequence, the keys, values and attributes of a mapping, the parts of a
    value, and the inner tensors and the context of a composite tensor.
    """
    match node:
        case Dict():
            return chain(chain.from_iterable(node.items), () if node.attributes is None else (node.attributes,))
        case Composite():
            return (*(child for _, child in node.inner), node.context)
        case Named():
            return tuple(child for _, child in node.items)
        case LibraryValue():
            return node.parts
        case Member():
            return (node.value,)
        case _:
            return elements(node)


def fqns(node: Node) -> Iterator[str]:
    """The FQNs of all tensors and arrays at or below `node`."""
    if isinstance(node, Tensor | Array):
        yield node.fqn
    for child in children(node):
        yield from fqns(child)


def items(node: Node) -> tuple[tuple[Node, Node], ...]:
    """The items of a mapping; empty for any other node."""
    return node.items if isinstance(node, Dict) else ()


def elements(node: Node) -> tuple[Node, ...]:
    """The elements of a sequence; empty for any other node."""
    return node.items if isinstance(node, Sequence) else ()


def with_elements(node: Sequence, made: Iterable[Node]) -> Sequence:
    """A sequence that differs from `node` only in its elements."""
    return msgspec.structs.replace(node, items=tuple(made))


def kind_of(node: Dict | Sequence) -> tuple[object, ...]:
    """All that a container says beside what it holds; equal for containers of one kind."""
    match node:
        case Deque():
            return node.kind, node.maxlen
        case NamedTuple():
            return node.kind, node.module, node.qualname, node.fields
        case _:
            return (node.kind,)


def files_of(data: bytes, key: str = "") -> FilesNode | None:
    """The files, if `data` describes files instead of a state, else None."""
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
"""The first bytes of an array of three with the tag of FilesNode. No tree of a state begins with them."""
