"""The stored state of one rank, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Alias
from checkpointd.layout.strides import check_alias, contiguous_stride
from checkpointd_client.capture.dtypes import ALL, DTYPES
from checkpointd_client.capture.scalars import decode_key

Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""FQN of a stored tensor -> its dtype by name and its shape."""


@dataclass(frozen=True, slots=True)
class StridedView:
    """Where a tensor's elements lie: `stride` and `offset` count elements in the row-major elements of `owner`."""

    fqn: str
    owner: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole: bool
    """Whether it is all of the owner in the owner's own order."""


class Stored:
    """The tensors of a checkpoint by FQN. FormatError if entries, aliases and tree contradict each other."""

    def __init__(self, root: tree.Node, entries: Entries, aliases: Sequence[Alias]) -> None:
        self.entries = entries
        self.aliases = {alias.fqn: alias for alias in aliases}
        parts = dict(self.children(root))
        if set(parts) != {"state", "client_state"} or not isinstance(parts["state"], tree.Dict):
            raise FormatError("the state tree does not hold a state and a client_state")
        if not isinstance(parts["client_state"], tree.Dict | None):
            raise FormatError("the client_state of the state tree is not a dict")
        self._places: dict[str, StridedView] = {}
        self._strides: dict[str, tuple[int, ...]] | None = None
        self.state: tree.Dict = parts["state"]
        self.client_state: tree.Dict | None = parts["client_state"]

    @staticmethod
    def children(node: tree.Node, *, stand_in: bool = False) -> Iterator[tuple[Hashable, tree.Node]]:
        """The items of a stored dict with their keys as `decode_key` gives them; none for any other node."""
        return ((decode_key(key, stand_in=stand_in), child) for key, child in tree.items(node))

    def find(self, fqn: object) -> StridedView | None:
        """The place of the tensor at `fqn`; None if no such tensor is stored."""
        return self.place(fqn) if isinstance(fqn, str) and (fqn in self.entries or fqn in self.aliases) else None

    def stride(self, fqn: str) -> tuple[int, ...] | None:
        """The strides that the tensor at `fqn` had; None if its elements lay row-major."""
        if self._strides is None:
            self._strides = dict(_strides(self.state))
        return self._strides.get(fqn)

    def place(self, fqn: str) -> StridedView:
        """Where the elements of the tensor at `fqn` are."""
        found = self._places.get(fqn)
        if found is None:
            found = self._places[fqn] = self._placed(fqn)
        return found

    def _placed(self, fqn: str) -> StridedView:
        alias = self.aliases.get(fqn)
        owner = alias.owner if alias else fqn
        if owner not in self.entries:
            raise FormatError(f"the state tree names {fqn}, which is not stored", fqn=fqn)
        dtype, shape = self.entries[owner]
        if dtype not in ALL:
            raise FormatError(f"{fqn} has the dtype {dtype!r}, which this torch does not have", fqn=fqn)
        if dtype not in DTYPES:
            raise FormatError(f"{fqn} has the dtype {dtype!r}, which checkpointd never stores", fqn=fqn)
        if alias is None:
            return StridedView(fqn, fqn, dtype, shape, contiguous_stride(shape), 0, whole=True)
        check_alias(alias, shape)
        whole = (alias.shape, alias.stride, alias.offset) == (shape, contiguous_stride(shape), 0)
        return StridedView(fqn, owner, dtype, alias.shape, alias.stride, alias.offset, whole)


def _strides(node: tree.Node) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(node, tree.Tensor) and node.stride is not None:
        yield node.fqn, node.stride
    for child in tree.children(node):
        yield from _strides(child)


def by_name(node: tree.Node) -> dict[str, tree.Node]:
    """The items of a stored dict with their keys as strings; none for any other node."""
    return {str(key): child for key, child in Stored.children(node, stand_in=True)}


def tensors_by_name(node: tree.Node) -> dict[str, tree.Tensor]:
    """The tensors among the items of a stored dict."""
    return {key: child for key, child in by_name(node).items() if isinstance(child, tree.Tensor)}
