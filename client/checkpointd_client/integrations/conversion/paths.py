"""Converts between DCP's flat names and the state tree: paths joined by dots, and nested nodes.

DCP flattens every mapping, and lists that hold tensors or mappings; all other values are leaves. `leaves` follows the same rule
for our nodes. A path that follows from the state tree by this rule need not be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from checkpointd.layout import tree
from checkpointd_client.capture.scalars import decode_key, key_text

Path = tuple[str | int, ...]
"""Keys of mappings as strings, positions in lists as integers, from the root of the state."""


def name_of(path: Path) -> str:
    """The flat name, which is also the FQN."""
    return ".".join(map(str, path))


def leaves(root: tree.Node) -> Iterator[tuple[Path, tree.Node]]:
    """The leaves of the state `root` by DCP's rule, each with its path."""
    if isinstance(root, tree.Dict):
        for key, child in root.items:
            yield from _leaves((_name(key),), child)


def _leaves(path: Path, node: tree.Node) -> Iterator[tuple[Path, tree.Node]]:
    if isinstance(node, tree.Dict) and not is_leaf(node):
        for key, child in node.items:
            yield from _leaves((*path, _name(key)), child)
    elif is_leaf(node):
        yield path, node
    elif isinstance(node, tree.Sequence):
        for i, child in enumerate(node.items):
            yield from _leaves((*path, i), child)


def _name(key: tree.Node) -> str:
    return key_text(decode_key(key, stand_in=True))


def is_leaf(node: tree.Node) -> bool:
    """Whether DCP treats the value as a leaf."""
    if isinstance(node, tree.Dict):
        return node.kind in tree.NAMESPACES
    if not isinstance(node, tree.Sequence) or node.kind != "list":
        return True
    return all(is_leaf(child) and not isinstance(child, tree.Tensor) for child in node.items)


def state_tree(found: Mapping[str, tuple[Path, tree.Node]]) -> tuple[tree.Node, dict[str, Path]]:
    """The state with the leaves `found`, and the paths that its shape cannot tell: their leaves have flat names in it."""
    flat: set[str] = set()
    while True:
        placed = [((name,) if name in flat else path, node) for name, (path, node) in found.items()]
        root = _nested(placed)
        told = {name_of(path): path for path, _ in leaves(root)}
        wrong = {name for name, (path, _) in found.items() if name not in flat and told.get(name) != path}
        tops = {found[name][0][0] for name in wrong} | {told[name][0] for name in told.keys() - found.keys()}
        more = {name for name, (path, _) in found.items() if name in wrong or path[0] in tops} - flat
        if not more:
            return root, {name: found[name][0] for name in flat if found[name][0] != (name,)}
        flat |= more


def _nested(placed: Iterable[tuple[Path, tree.Node]]) -> tree.Node:
    """One tree of all leaves; of two leaves at a path and below it, the outer one is lost."""
    root: dict[str | int, Any] = {}
    for path, node in placed:
        level = root
        for key in path[:-1]:
            below = level.get(key)
            if not isinstance(below, dict):
                below = level[key] = {}
            level = below
        if not isinstance(level.get(path[-1]), dict):
            level[path[-1]] = _PathLeaf(node)
    return _made(root, top=True)


class _PathLeaf:
    """Marks a node, since the dicts that are still being filled are no nodes."""

    __slots__ = ("node",)

    def __init__(self, node: tree.Node) -> None:
        self.node = node


def _made(level: Any, *, top: bool = False) -> tree.Node:
    if isinstance(level, _PathLeaf):
        return level.node
    if not top and level.keys() == set(range(len(level))):
        return tree.Sequence("list", tuple(_made(level[i]) for i in range(len(level))))
    return tree.Dict("dict", tuple((key, _made(child)) for key, child in level.items()))
