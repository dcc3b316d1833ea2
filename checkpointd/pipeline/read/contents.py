"""The digests of what one rank stored beside the elements of global tensors (`layout/joint_plan.py`), from its index.

The state tree is not decoded as a whole: a state of very many tensors has nearly all of it in parts with global tensors, of
which the bytes are enough.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import msgspec
import xxhash

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Alias, Index, TensorEntry
from checkpointd.layout.manifest import StoredContent
from checkpointd.layout.strides import contiguous_stride

OWN_VALUES_MAX = 64
"""A rank with more own values has none: all of them count as its frame, so that votes stay small."""
_PARTS = ("state", "client_state")
_RAW_ITEMS = msgspec.msgpack.Decoder(tuple[str, str, tuple[tuple[msgspec.Raw, msgspec.Raw], ...], msgspec.Raw])
_TEXT = msgspec.msgpack.Decoder(str)


def identity(fqn: str, own: Mapping[str, TensorEntry], aliases: Mapping[str, Alias], shared: Container[str]) -> object:
    """A value for the content of the tensor `fqn` of one rank: equal for two ranks if and only if every bit of it is.

    `own`: the tensors that the rank stored for itself; `shared`: those that ranks hold together. KeyError if it is neither.
    """
    alias = aliases.get(fqn)
    owner, view = (fqn, None) if alias is None else (alias.owner, (alias.shape, alias.stride, alias.offset))
    if owner in shared:
        return owner, view
    entry = own[owner]
    if view == (entry.shape, contiguous_stride(entry.shape), 0):
        view = None  # all of it, as if it were stored itself
    return entry.dtype, entry.shape, tuple((chunk.raw, chunk.digest) for chunk in entry.chunks), view


def content_of(index: Index) -> StoredContent:
    """The digests of what the rank of `index` stored beside the elements of global tensors."""
    try:
        return _Contents(index).digests()
    except (msgspec.DecodeError, FormatError, KeyError, UnicodeDecodeError):
        return _Contents(index).frame_alone()  # a load reports the tree


class _Contents:
    def __init__(self, index: Index) -> None:
        self._index = index
        self._shared = {entry.fqn for entry in index.tensors if entry.scope == "global"}
        self._above_shared = _with_places_above(self._shared)
        self._own = {entry.fqn: entry for entry in index.tensors if entry.scope == "rank"}
        self._aliases = {alias.fqn: alias for alias in index.aliases}
        self._values: dict[str, bytes] = {}

    def frame_alone(self) -> StoredContent:
        """All of it as the frame."""
        return StoredContent(frame=self._frame(self._index.tree, ()))

    def digests(self) -> StoredContent:
        """The frame, and the own values if they are few."""
        kind, heads = self._heads()
        if len(self._values) > OWN_VALUES_MAX or not self._values:
            return self.frame_alone()
        values = {fqn: xxhash.xxh3_128_hexdigest(data) for fqn, data in self._values.items()}
        return StoredContent(frame=self._frame(msgspec.msgpack.encode((kind, heads)), values), own_values=values)

    def _frame(self, structure: bytes, values: Container[str]) -> str:
        """The digest of the frame, whose tree is `structure`: with the tensors that are no own values."""
        owners = {alias.owner for alias in self._index.aliases}
        kept = [
            (entry.fqn, entry.dtype, entry.shape, [(chunk.raw, chunk.digest) for chunk in entry.chunks])
            for entry in self._own.values()
            if entry.fqn not in values or entry.fqn in owners
        ]
        facts = (structure, sorted(kept), sorted(map(msgspec.to_builtins, self._index.aliases)), self._index.excluded)
        return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(facts))

    def _heads(self) -> tuple[str, list[Any]]:
        """The kind of the root, and its items with every own value left out."""
        kind, items = _items(self._index.tree)
        heads: list[Any] = []
        for name, child in items:
            place = _TEXT.decode(name)
            if place not in _PARTS or bytes(child) == b"\xc0":
                heads.append((name, child))
                continue
            inner_kind, parts = _items(child)
            prefix = "" if place == "state" else place
            heads.append((name, inner_kind, [(key, self._part(key, part, prefix)) for key, part in parts]))
        return kind, heads

    def _part(self, key: msgspec.Raw, part: msgspec.Raw, prefix: str) -> object:
        """One part of the state as the frame has it."""
        try:
            fqn = f"{prefix}.{_TEXT.decode(key)}" if prefix else _TEXT.decode(key)
        except msgspec.DecodeError:
            return part  # a key that is no string
        if fqn in self._above_shared:
            return part
        return self._without_values(tree.decode(bytes(part)), fqn)

    def _without_values(self, node: tree.Node, fqn: str) -> object:
        """The structure of `node`; notes the own values at and below it."""
        if isinstance(node, tree.Dict) and all(isinstance(key, str) for key, _ in node.items):
            items = [(key, self._without_values(child, f"{fqn}.{key}")) for key, child in node.items]
            return node.kind, items, node.attributes
        if _has_dict(node):
            return node
        if fqn in self._values:
            raise FormatError(f"two values are called {fqn}", fqn=fqn)
        self._values[fqn] = msgspec.msgpack.encode(self._print(node))
        return None

    def _print(self, node: tree.Node) -> object:
        """The part of a value without dicts that counts when ranks are compared."""
        if isinstance(node, tree.Tensor | tree.Array):
            return type(node).__name__, identity(node.fqn, self._own, self._aliases, self._shared)
        if isinstance(node, tree.Sequence):
            return tree.kind_of(node), [self._print(child) for child in node.items]
        if isinstance(node, tree.Composite):
            head = tree.encode(msgspec.structs.replace(node, inner=()))
            return head, [(name, self._print(child)) for name, child in node.inner]
        return tree.encode(node)


def _items(data: bytes | msgspec.Raw) -> tuple[str, tuple[tuple[msgspec.Raw, msgspec.Raw], ...]]:
    """The kind of the mapping in `data`, which has no attributes, and its items. DecodeError if it is something else."""
    tag, kind, items, attributes = _RAW_ITEMS.decode(data)
    if tag != "D" or bytes(attributes) != b"\xc0":
        raise msgspec.DecodeError("not a mapping without attributes")
    return kind, items


def _has_dict(node: tree.Node) -> bool:
    return isinstance(node, tree.Dict) or any(map(_has_dict, tree.elements(node)))


def _with_places_above(fqns: Iterable[str]) -> set[str]:
    """`fqns`, and every place above one of them."""
    found: set[str] = set()
    for fqn in fqns:
        while fqn not in found:
            found.add(fqn)
            fqn = fqn.rpartition(".")[0]
    return found
