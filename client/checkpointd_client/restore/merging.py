"""Merges the state trees of all ranks into one tree of the values that were equal on all ranks that had them."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field

import msgspec

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd_client.capture.scalars import decode_key, key_text

Ranks = tuple[int, ...]
Having = Sequence[tuple[Ranks, tree.Node]]
"""The different nodes at one place of the trees, each with the ranks that have it."""

_CLIENT_STATE = "client_state"
_GROUPS = ".param_groups"
_PARAMS, _PARAM_NAMES = "params", "param_names"


class _Different:
    """Stands for values that are not the same on all ranks."""


_DIFFERENT = _Different()


@dataclass
class Merging:
    """One merge.

    `identity`: for a rank and an FQN, a value that is equal for equal tensors. `keep`: where values differ, those of this rank
    are taken; with None they are left out. `differing`: places at which ranks that are not looked at have other values.
    `chosen`: for the FQN of each tensor in the tree, a rank that has it. `left`: places where values differ. `partial`: places
    that not all ranks have.
    """

    identity: Callable[[int, str], object]
    keep: int | None = None
    differing: Container[str] = ()
    chosen: dict[str, int] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    partial: set[str] = field(default_factory=set)

    def merged(self, trees: Having) -> tree.Node:
        """The merged tree. FormatError if one of `trees` is not the tree of a state."""
        if not all(isinstance(root, tree.Dict) for _, root in trees):
            raise FormatError("the state tree does not hold a state and a client_state")
        parts: list[tuple[tree.Node, tree.Node]] = []
        for key in ("state", _CLIENT_STATE):
            having = [(ranks, child) for ranks, root in trees for name, child in tree.items(root) if name == key]
            made = self._any(having, "" if key == "state" else _CLIENT_STATE)
            parts.append((key, None if isinstance(made, _Different) else made))
        return tree.Dict("dict", tuple(parts))

    def _any(self, having: Having, fqn: str) -> tree.Node | _Different:
        nodes = [node for _, node in having]
        first = nodes[0]
        made: tree.Node | _Different = _DIFFERENT
        if fqn in self.differing:
            pass
        elif isinstance(first, tree.Dict) and _of_kind(first, nodes):
            made = self._dict(first, having, fqn)
        elif isinstance(first, tree.Sequence) and _of_kind(first, nodes):
            made = self._sequence(first, having, fqn)
        elif isinstance(first, tree.Tensor | tree.Array) and all(type(n) is type(first) for n in nodes):
            made = self._tensor(first, having)
        elif isinstance(first, tree.Composite) and all(isinstance(n, tree.Composite) for n in nodes):
            made = self._composite(first, having, fqn)
        elif len({tree.encode(node) for node in nodes}) == 1:
            made = first
        if isinstance(made, _Different) and self.keep is not None and self.keep in having[0][0]:
            self._choose(first, self.keep)
            return first
        return made

    def _choose(self, node: tree.Node, rank: int) -> None:
        """Take all tensors at or below `node` from `rank`."""
        self.chosen |= dict.fromkeys(tree.fqns(node), rank)

    def _dict(self, first: tree.Dict, having: Having, fqn: str) -> tree.Dict:
        children: dict[bytes, tuple[tree.Node, list[tuple[Ranks, tree.Node]]]] = {}
        for ranks, node in having:
            for key, child in tree.items(node):
                children.setdefault(tree.encode(key), (key, []))[1].append((ranks, child))
        kept: list[tuple[tree.Node, tree.Node]] = []
        for key, found in children.values():
            text = key_text(decode_key(key, stand_in=True))
            path = f"{fqn}.{text}" if fqn else text
            made = self._any(found, path)
            if isinstance(made, _Different):
                self.left.append(path)
                continue
            kept.append((key, made))
            if len(found) < len(having):
                self.partial.add(path)
        return tree.Dict(first.kind, tuple(kept), self._attributes(having, fqn))

    def _attributes(self, having: Having, fqn: str) -> tree.Dict | None:
        """Merge the attributes of dicts as the items of a dict; those that not all ranks have, too."""
        found = [(ranks, node.attributes) for ranks, node in having if isinstance(node, tree.Dict) and node.attributes]
        return self._dict(found[0][1], found, fqn) if found else None

    def _sequence(self, first: tree.Sequence, having: Having, fqn: str) -> tree.Node | _Different:
        lists = [list(tree.elements(node)) for _, node in having]
        if fqn.endswith(_GROUPS) and all(_is_named(group) for groups in lists for group in groups):
            made_groups = self._groups([(ranks, groups) for (ranks, _), groups in zip(having, lists, strict=True)])
            return _DIFFERENT if made_groups is None else tree.with_elements(first, made_groups)
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
        return tree.with_elements(first, (item for item in made if not isinstance(item, _Different)))

    def _composite(self, first: tree.Composite, having: Having, fqn: str) -> tree.Node | _Different:
        """Merge a composite tensor, as a whole: all ranks must have had the same inner tensors."""
        heads = {tree.encode(msgspec.structs.replace(n, inner=())) for _, n in having if isinstance(n, tree.Composite)}
        inner = [(ranks, dict(node.inner)) for ranks, node in having if isinstance(node, tree.Composite)]
        if len(heads) > 1 or any(of.keys() != inner[0][1].keys() for _, of in inner):
            return _DIFFERENT
        before = len(self.left)
        made = {name: self._any([(ranks, of[name]) for ranks, of in inner], f"{fqn}.{name}") for name, _ in first.inner}
        kept = tuple((name, node) for name, node in made.items() if not isinstance(node, _Different))
        if len(kept) < len(made) or len(self.left) > before:
            del self.left[before:]
            return _DIFFERENT
        return msgspec.structs.replace(first, inner=kept)

    def _groups(self, having: Sequence[tuple[Ranks, Sequence[tree.Node]]]) -> tuple[tree.Node, ...] | None:
        """Merge the param groups of an optimizer by the names of their parameters, since ranks may hold different layers.

        Groups of different ranks with the same settings become one group, if possible one at the same position. Any other
        group stays, with the parameters that only it has. None if ranks have different settings for one parameter and none of
        these ranks is `keep`, or if two groups need different tensors under one FQN.
        """
        made = _Groups(self.keep)
        for ranks, groups in having:
            rank = self.keep if self.keep is not None and self.keep in ranks else ranks[0]
            joined: set[int] = set()
            for position, node in enumerate(groups):
                assert isinstance(node, tree.Dict)  # _is_named looked
                settings = self._print(rank, node)
                apart = rank != self.keep and any(tree.fqns(node)) and any(self._print(r, node) != settings for r in ranks)
                if apart or not made.add(_Group(position, settings, [(rank, node)]), joined):
                    return None
        chosen = made.chosen()
        for rank, node in chosen or ():
            self._choose(node, rank)
        return None if chosen is None else tuple(node for _, node in chosen)

    def _print(self, rank: int, node: tree.Node) -> Hashable:
        """A value that is equal for two groups of any ranks if all their settings are."""
        if isinstance(node, tree.Dict):
            items = ((key, child) for key, child in node.items if key not in (_PARAMS, _PARAM_NAMES))
            return node.kind, frozenset((tree.encode(key), self._print(rank, child)) for key, child in items)
        if isinstance(node, tree.Sequence):
            return tree.kind_of(node), tuple(self._print(rank, child) for child in node.items)
        return self.identity(rank, node.fqn) if isinstance(node, tree.Tensor | tree.Array) else tree.encode(node)

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


@dataclass(slots=True, eq=False)
class _Group:
    """One param group of the merged optimizer, and the groups of different ranks that it consists of (`parts`)."""

    position: int
    settings: Hashable
    parts: list[tuple[int, tree.Dict]]
    names: dict[str, None] = field(init=False)
    """The names of its parameters, in order."""
    _is_whole: bool = True
    """Whether all its parts have the same parameters and the same `param_names`, torch's own list of their names."""

    def __post_init__(self) -> None:
        (_, node), *_ = self.parts
        self.names = dict.fromkeys(name for name in tree.elements(dict(node.items)[_PARAMS]) if isinstance(name, str))

    def without(self, names: set[str]) -> None:
        """Leave the parameters `names` to other groups."""
        if names:
            self._is_whole = False
            self.names = {name: None for name in self.names if name not in names}

    def join(self, other: _Group) -> None:
        """Add the parameters and parts of `other`."""
        own, others = (dict(group.parts[0][1].items).get(_PARAM_NAMES) for group in (self, other))
        self._is_whole &= other._is_whole and self.names == other.names and tree.encode(own) == tree.encode(others)
        self.position = max(self.position, other.position)
        self.names |= other.names
        self.parts += other.parts

    def made(self, node: tree.Dict) -> tree.Dict:
        """The group with the settings in `node`; without `param_names` if no rank had all of the parameters."""
        kept = (item for item in node.items if self._is_whole or item[0] != _PARAM_NAMES)
        params = dict(node.items)[_PARAMS]
        assert isinstance(params, tree.Sequence)  # _is_named looked
        names = tree.with_elements(params, self.names)
        return msgspec.structs.replace(node, items=tuple((key, names if key == _PARAMS else child) for key, child in kept))


@dataclass(slots=True)
class _Groups:
    """The param groups of one optimizer during the merge; the groups of rank `keep` are added first."""

    keep: int | None
    _alike: dict[Hashable, list[_Group]] = field(default_factory=dict)
    """The groups by their settings."""
    _of: dict[str, _Group] = field(default_factory=dict)
    """The group of each parameter, by its name."""

    def add(self, group: _Group, joined: set[int]) -> bool:
        """False if `group` contradicts a group of a rank other than `keep`.

        `joined`: the groups that this rank has joined. Another of its groups joins them only for a parameter of theirs.
        """
        taken = {name for name in group.names if name in self._of}
        rivals = {id(one): one for one in map(self._of.__getitem__, taken) if one.settings != group.settings}
        if any(one.parts[0][0] != self.keep for one in rivals.values()):
            return False
        known = {id(one): one for name in group.names if name in taken and (one := self._of[name]).settings == group.settings}
        joined.update(known)
        if taken and taken == group.names.keys():
            return True
        group.without(taken)
        found = self._alike.setdefault(group.settings, [])
        free = [*known.values()] or [one for one in found if id(one) not in joined]
        into = next((one for one in free if one.position == group.position), free[0] if free else None)
        if into is None:
            found.append(group)
        else:
            into.join(group)
        joined.add(id(into or group))
        self._of |= dict.fromkeys(group.names, into or group)
        return True

    def chosen(self) -> list[tuple[int, tree.Dict]] | None:
        """Each group with the rank whose settings it has. None if one FQN would then name different tensors."""
        found = [group for groups in self._alike.values() for group in groups]
        used: set[str] = set()
        nodes: dict[int, tuple[int, tree.Dict]] = {}
        for group in sorted(found, key=lambda group: len(group.parts)):
            part = next(((r, node) for r, node in group.parts if used.isdisjoint(tree.fqns(node))), None)
            if part is None:
                return None
            used.update(tree.fqns(part[1]))
            nodes[id(group)] = part[0], group.made(part[1])
        return [nodes[id(group)] for group in sorted(found, key=lambda group: group.position)]


def _of_kind(first: tree.Dict | tree.Sequence, nodes: Sequence[tree.Node]) -> bool:
    """Whether all of `nodes` are containers of the kind of `first`."""
    kind = tree.kind_of(first)
    return all(isinstance(node, tree.Dict | tree.Sequence) and tree.kind_of(node) == kind for node in nodes)


def _is_named(group: tree.Node) -> bool:
    """Whether `group` is a param group whose parameters are stored by name."""
    params = [child for key, child in tree.items(group) if key == _PARAMS]
    return len(params) == 1 and isinstance(params[0], tree.Sequence) and all(isinstance(i, str) for i in params[0].items)
