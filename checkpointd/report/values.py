"""The values that a checkpoint holds beside its tensors, each as path, kind and text."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.tree import Node

PATHS_MAX = 1 << 27
"""The most characters that the paths of all values may have together."""
_STATE = "state."
"""The path of the state in the tree; FQNs are relative to it."""
_TENSORS = (tree.Tensor, tree.Array, tree.Composite)


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf of the state tree that is not a tensor; a list of plain values is one leaf. `text` is never shortened."""

    path: str
    kind: str
    text: str


def values_of(root: Node) -> Iterator[Value]:
    """The leaves of `root` in order, without tensors. FormatError if their paths are too long together. It does not recurse,
    since a hostile tree may be deep.
    """
    todo: list[tuple[str, Node]] = [("", root)]
    characters = 0
    while todo:
        path, node = todo.pop()
        children = _children(node)
        if children and not (isinstance(node, tree.Sequence) and _is_plain(node)):
            characters += (len(path) + 1) * len(children) + sum(len(name) for name, _ in children)
            if characters > PATHS_MAX:
                raise FormatError(
                    f"the names of its values have more than {PATHS_MAX} characters together, since containers with long names "
                    "hold many values: look at it without --values"
                )
            todo += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]
        elif not isinstance(node, _TENSORS):
            yield Value(path=path.removeprefix(_STATE), kind=kind_of(node), text=text_of(node))


def _children(node: Node) -> list[tuple[str, Node]]:
    if isinstance(node, tree.Dict):
        return [(text_of(key), child) for key, child in node.items]
    if isinstance(node, tree.Sequence):
        return [(str(position), child) for position, child in enumerate(node.items)]
    return []


def _is_plain(node: tree.Sequence) -> bool:
    return not any(isinstance(item, (*_TENSORS, tree.Dict, tree.Sequence)) for item in node.items)


def kind_of(node: Node) -> str:
    if isinstance(node, tree.Dict | tree.Sequence | tree.TorchName | tree.LibraryValue):
        return node.kind
    if isinstance(node, tree.Member):
        return "enum"
    if isinstance(node, tree.NumpyScalar):
        return node.dtype
    if isinstance(node, tree.BigInt):
        return "int"
    return "None" if node is None else type(node).__name__.lower()


def text_of(node: Node) -> str:
    """A plain value as Python writes it, and a string without quotes."""
    match node:
        case tree.NamedTuple():
            inner = ", ".join(f"{name}={text_of(item)}" for name, item in zip(node.fields, node.items, strict=False))
            return f"{node.module}.{node.qualname}({inner})"
        case tree.Member():
            return f"{node.module}.{node.qualname}.{node.name} = {text_of(node.value)}"
        case tree.LibraryValue(kind, parts):
            return _value_text(kind, tuple(map(text_of, parts)))
        case tree.Sequence():
            inner = ", ".join(text_of(item) for item in node.items)
            return f"({inner})" if node.kind == "tuple" else f"[{inner}]"
        case tree.Dict():
            return "{}"
        case tree.Bytes() | tree.NumpyScalar():
            return node.data.hex()
        case tree.BigInt():
            return node.hexadecimal
        case tree.Complex():
            return str(complex(node.real, node.imag))
        case tree.TorchName():
            return node.name
        case tree.Tensor() | tree.Array():
            return node.fqn
        case _:
            return str(node)


def _value_text(kind: str, parts: tuple[str, ...]) -> str:
    match kind, parts:
        case _, (text,):
            return text
        case (("datetime" | "time"), (text, fold, zone)):
            return " ".join((text, *(() if zone == "None" else (zone,)), *(() if fold == "0" else (f"fold={fold}",))))
        case "timezone", (offset, "None"):
            return offset
        case "timedelta", (days, seconds, microseconds):
            return f"{days} d {seconds} s {microseconds} us"
        case "UUID", (text, "unknown"):
            return text
        case "Fraction", (numerator, denominator):
            return f"{numerator}/{denominator}"
        case _:
            return f"({', '.join(parts)})"
