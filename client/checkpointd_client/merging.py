"""One state tree out of those of all ranks: what any of them had, where those that had it had the same."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd_client.values import decode_key, key_text

Ranks = tuple[int, ...]
Having = Sequence[tuple[Ranks, tree.Node]]
"""What is at one place of the trees, and the ranks that have it."""

_CLIENT_STATE = "client_state"
_GROUP_PARAMS = re.compile(r"\.param_groups\.\d+\.params\Z")


class _Different:
    """Stands for values that are not the same on all ranks."""


_DIFFERENT = _Different()


@dataclass
class Merging:
    """One merge. `identity` tells what the tensor that a rank calls by a name holds; `keep` is the rank whose values stand
    where they differ, None where none do.

    `chosen`: a rank that has it, for the FQN of each tensor in the tree. `left`: places where values differ. `partial`: places
    that not all ranks have.
    """

    identity: Callable[[int, str], object]
    keep: int | None = None
    chosen: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)

    def merged(self, trees: Having) -> tree.Node:
        """The tree of all; FormatError where one is no tree of a state."""
        if not all(isinstance(root, tree.Dict) for _, root in trees):
            raise FormatError("the state tree does not hold a state and a client_state")
        parts: list[tuple[tree.Node, tree.Node]] = []
        for key in ("state", _CLIENT_STATE):
            having = [(ranks, child) for ranks, root in trees for name, child in _items(root) if name == key]
            made = self._any(having, "" if key == "state" else _CLIENT_STATE)
            parts.append((key, None if isinstance(made, _Different) else made))
        return tree.Dict("dict", tuple(parts))

    def _any(self, having: Having, fqn: str) -> tree.Node | _Different:
        nodes = [node for _, node in having]
        first = nodes[0]
        made: tree.Node | _Different = _DIFFERENT
        if isinstance(first, tree.Dict) and all(isinstance(n, tree.Dict) and n.kind == first.kind for n in nodes):
            made = self._dict(first, having, fqn)
        elif isinstance(first, tree.Sequence) and all(isinstance(n, tree.Sequence) and n.kind == first.kind for n in nodes):
            made = self._sequence(first, having, fqn)
        elif isinstance(first, tree.Tensor | tree.Array) and all(type(n) is type(first) for n in nodes):
            made = self._tensor(first, having)
        elif len({tree.encode(node) for node in nodes}) == 1:
            made = first
        if isinstance(made, _Different) and self.keep in having[0][0]:
            self._choose(first, self.keep)
            return first
        return made

    def _choose(self, node: tree.Node, rank: int | None) -> None:
        """Everything below `node` is that of `rank`."""
        if isinstance(node, tree.Tensor | tree.Array) and rank is not None:
            self.chosen[node.fqn] = rank
        for child in [child for _, child in _items(node)] if isinstance(node, tree.Dict) else _children(node):
            self._choose(child, rank)

    def _dict(self, first: tree.Dict, having: Having, fqn: str) -> tree.Node:
        children: dict[bytes, tuple[tree.Node, list[tuple[Ranks, tree.Node]]]] = {}
        for ranks, node in having:
            for key, child in _items(node):
                children.setdefault(tree.encode(key), (key, []))[1].append((ranks, child))
        kept: list[tuple[tree.Node, tree.Node]] = []
        for key, found in children.values():
            text = key_text(decode_key(key))
            path = f"{fqn}.{text}" if fqn else text
            made = self._any(found, path)
            if isinstance(made, _Different):
                self.left.append(path)
                continue
            kept.append((key, made))
            if len(found) < len(having):
                self.partial.add(path)
        return tree.Dict(first.kind, tuple(kept))

    def _sequence(self, first: tree.Sequence, having: Having, fqn: str) -> tree.Node | _Different:
        lists = [list(_children(node)) for _, node in having]
        if _GROUP_PARAMS.search(fqn) and all(isinstance(item, str) for items in lists for item in items):
            # The parameters of an optimizer's group, by name: ranks that hold other layers have others.
            return tree.Sequence(first.kind, tuple(dict.fromkeys(item for items in lists for item in items)))
        if len({len(items) for items in lists}) != 1:
            return _DIFFERENT
        before = len(self.left)
        made = [
            self._any([(ranks, items[i]) for (ranks, _), items in zip(having, lists, strict=True)], f"{fqn}.{i}")
            for i in range(len(lists[0]))
        ]
        if any(isinstance(item, _Different) for item in made) or len(self.left) > before:
            del self.left[before:]  # a list is left as a whole
            return _DIFFERENT
        return tree.Sequence(first.kind, tuple(item for item in made if not isinstance(item, _Different)))

    def _tensor(self, first: tree.Tensor | tree.Array, having: Having) -> tree.Node | _Different:
        same = {
            self.identity(rank, node.fqn)
            for ranks, node in having
            if isinstance(node, tree.Tensor | tree.Array)
            for rank in ranks
        }
        if len(same) > 1:
            return _DIFFERENT
        self.chosen[first.fqn] = having[0][0][0]
        return first


def _items(node: tree.Node) -> Sequence[tuple[tree.Node, tree.Node]]:
    return node.items if isinstance(node, tree.Dict) else ()


def _children(node: tree.Node) -> Sequence[tree.Node]:
    return node.items if isinstance(node, tree.Sequence) else ()
