"""Python values from the nodes of a state tree: the inverse of `flatten.py`, with tensors taken from their bindings."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd_client.capture import scalars

Build = Callable[[], Any]
"""Makes a value once the bindings are bound."""

_DICTS: dict[str, Callable[[Iterable[tuple[Any, Any]]], dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    # Counter(pairs) would count the pairs.
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}


def constant(node: tree.Node) -> Build:
    """A scalar, decoded at once, so that unreadable ones are found before anything is changed."""
    return given(scalars.decode(node))


def given(value: object) -> Build:
    """`value` itself."""
    return lambda: value


def dict_of(kind: str, parts: Mapping[Hashable, Build]) -> Build:
    """A dict of the stored class."""
    return lambda: _DICTS[kind]((key, part()) for key, part in parts.items())


def sequence_of(kind: str, parts: Iterable[Build]) -> Build:
    """A list, tuple, set or torch.Size. FormatError if it holds values that its class cannot hold."""
    made = list(parts)
    return lambda: _sequence(kind, (part() for part in made))


def _sequence(kind: str, values: Iterable[Any]) -> Any:
    try:
        return _SEQUENCES[kind](values)
    except TypeError as error:
        raise FormatError(f"the state tree holds a {kind} with values that it cannot hold: {error}") from error


def value_of(node: tree.Node, leaf: Callable[[tree.Node], Any] = scalars.decode) -> Any:
    """The Python value of `node`; `leaf` gives the value of a node without parts, tensors included."""
    if isinstance(node, tree.Dict):
        return _DICTS[node.kind]((scalars.decode_key(key), value_of(child, leaf)) for key, child in node.items)
    if isinstance(node, tree.Sequence):
        return _sequence(node.kind, [value_of(child, leaf) for child in node.items])
    return leaf(node)


def words(node: tree.Node) -> str:
    """A node in words, for messages."""
    match node:
        case tree.Tensor():
            return "a tensor"
        case tree.Array():
            return "a numpy array"
        case tree.Dict(kind) | tree.Sequence(kind):
            return f"a {kind}"
        case _:
            return f"the value {scalars.decode(node)!r:.80}"


def is_scalar(node: tree.Node) -> bool:
    """Whether `node` stands for a value without parts."""
    return not isinstance(node, tree.Tensor | tree.Array | tree.Dict | tree.Sequence)
