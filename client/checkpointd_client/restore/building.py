"""Python values from the nodes of a state tree: the inverse of `flatten.py`, with tensors taken from their bindings."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from checkpointd.arguments import shown
from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd_client.capture import scalars
from checkpointd_client.capture.plain import classes, containers, values

Build = Callable[[], Any]
"""Makes a value once the bindings are bound."""


def _namespace(kind: str, pairs: Iterable[tuple[Any, Any]]) -> Any:
    try:
        return containers.namespace(kind, dict(pairs))
    except TypeError as error:
        raise FormatError(f"the state tree holds a {kind} that cannot be read: {error}") from error


_DICTS: dict[str, Callable[[Iterable[tuple[Any, Any]]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    # Counter(pairs) would count the pairs.
    "Counter": lambda pairs: collections.Counter(dict(pairs)),
    **{kind: partial(_namespace, kind) for kind in tree.NAMESPACES},
}
_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}


def constant(node: tree.Node, *, known: type | None = None, stand_in: bool = False) -> Build:
    """A scalar as `scalars.decode` gives it. It is decoded at once, so that unreadable ones are found before anything is
    changed. A value that can be changed is decoded anew each time.
    """
    decoded = partial(scalars.decode, node, known=known, stand_in=stand_in)
    found = decoded()
    return decoded if type(found) in values.MUTABLE else given(found)


def given(value: object) -> Build:
    """`value` itself."""
    return lambda: value


def dict_of(kind: str, parts: Mapping[Hashable, Build], attributes: Build | None = None) -> Build:
    """A dict of the stored class. `attributes`: those that it has beside its items, as a dict."""
    if attributes is None:
        return lambda: _DICTS[kind]((key, part()) for key, part in parts.items())
    return lambda: _with_attributes(_DICTS[kind]((key, part()) for key, part in parts.items()), attributes())


def _with_attributes(made: Any, attributes: Mapping[str, Any]) -> Any:
    if type(made) is not dict:  # which cannot have any
        vars(made).update(attributes)
    return made


def list_of(parts: Iterable[Build]) -> Build:
    """A list."""
    made = list(parts)
    return lambda: [part() for part in made]


def sequence_of(node: tree.Sequence, parts: Iterable[Build], *, known: type | None = None, stand_in: bool = False) -> Build:
    """A sequence like `node`, of other parts. FormatError if it holds values that its class cannot hold.

    A named tuple is of the class `known`, if that has the stored name, or of a class that is imported. If there is none:
    StateError; with `stand_in`, it is a dict of its fields.
    """
    maker, made = _maker(node, known, stand_in), list(parts)
    return lambda: _sequence(node, maker, [part() for part in made])


def _maker(node: tree.Sequence, known: type | None, stand_in: bool) -> Callable[[list[Any]], Any]:
    if isinstance(node, tree.Deque):
        if node.maxlen is not None and node.maxlen < len(node.items):
            raise FormatError(f"the state tree holds a deque of {len(node.items)} values, and of at most {node.maxlen}")
        return partial(collections.deque, maxlen=node.maxlen)
    if not isinstance(node, tree.NamedTuple):
        return _SEQUENCES[node.kind]
    if len(node.fields) != len(node.items):
        raise FormatError(f"the state tree holds a {node.qualname} of {len(node.items)} values for {len(node.fields)} fields")
    try:
        cls = classes.namedtuple_class(node.module, node.qualname, node.fields, known)
    except StateError:
        if stand_in:
            return lambda parts: dict(zip(node.fields, parts, strict=True))
        raise
    return partial(tuple.__new__, cls)


def _sequence(node: tree.Sequence, maker: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    try:
        return maker(parts)
    except (TypeError, ValueError, OverflowError) as error:
        raise FormatError(f"the state tree holds a {node.kind} with values that it cannot hold: {error}") from error


def _leaf(node: tree.Node) -> Any:
    return scalars.decode(node, stand_in=True)


def value_of(node: tree.Node, leaf: Callable[[tree.Node], Any] = _leaf) -> Any:
    """The Python value of `node`; `leaf` gives the value of a node without parts, tensors included.

    If this process does not have the class of a value: a StoredMember for the member of an enum, and a dict for a named tuple.
    """
    if isinstance(node, tree.Dict):
        pairs = ((scalars.decode_key(key, stand_in=True), value_of(child, leaf)) for key, child in node.items)
        made = _DICTS[node.kind](pairs)
        return made if node.attributes is None else _with_attributes(made, value_of(node.attributes, leaf))
    if isinstance(node, tree.Sequence):
        return _sequence(node, _maker(node, None, stand_in=True), [value_of(child, leaf) for child in node.items])
    return leaf(node)


def words(node: tree.Node) -> str:
    """A node in words, for messages."""
    match node:
        case tree.Tensor():
            return "a tensor"
        case tree.Composite(kind):
            return f"a {kind} tensor"
        case tree.Array():
            return "a numpy array"
        case tree.NamedTuple():
            return f"a named tuple {node.module}.{node.qualname} of ({', '.join(node.fields)})"
        case tree.Dict(kind) | tree.Sequence(kind):
            return f"a {kind}"
        case _:
            return f"the value {shown(_leaf(node))}"


def is_scalar(node: tree.Node) -> bool:
    """Whether `node` stands for a value without parts."""
    return not isinstance(node, tree.Tensor | tree.Array | tree.Dict | tree.Sequence | tree.Composite)
