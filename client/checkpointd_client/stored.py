"""What a checkpoint holds of one rank's state, checked before anything is built from it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.manifest import Alias
from checkpointd_client.dtypes import ALL, DTYPES
from checkpointd_client.memory import contiguous_stride
from checkpointd_client.values import decode_key

Entries = Mapping[str, tuple[str, tuple[int, ...]]]
"""FQN of a stored tensor -> its dtype by name and its shape."""


@dataclass(frozen=True, slots=True)
class Place:
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
    """The tensors of a checkpoint by FQN; FormatError where entries, aliases and tree contradict each other."""

    def __init__(self, root: tree.Node, entries: Entries, aliases: Sequence[Alias]) -> None:
        self.entries = entries
        self.aliases = {alias.fqn: alias for alias in aliases}
        parts = dict(self.children(root)) if isinstance(root, tree.Dict) else {}
        if set(parts) != {"state", "client_state"} or not isinstance(parts["state"], tree.Dict):
            raise FormatError("the state tree does not hold a state and a client_state")
        if not isinstance(parts["client_state"], tree.Dict | None):
            raise FormatError("the client_state of the state tree is not a dict")
        self.state: tree.Dict = parts["state"]
        self.client_state: tree.Dict | None = parts["client_state"]

    @staticmethod
    def children(node: tree.Dict) -> Iterator[tuple[Hashable, tree.Node]]:
        """The items of a stored dict with their keys as Python values."""
        return ((decode_key(key), child) for key, child in node.items)

    def find(self, fqn: object) -> Place | None:
        """The place of the tensor at `fqn`; None where no such tensor is stored."""
        return self.place(fqn) if isinstance(fqn, str) and (fqn in self.entries or fqn in self.aliases) else None

    def place(self, fqn: str) -> Place:
        """Where the elements of the tensor at `fqn` are."""
        alias = self.aliases.get(fqn)
        owner = alias.owner if alias else fqn
        if owner not in self.entries:
            raise FormatError(f"the state tree names {fqn}, which is not stored", fqn=fqn)
        dtype, shape = self.entries[owner]
        if dtype not in ALL:
            raise FormatError(f"{fqn} has the dtype {dtype!r}, which this torch does not have", fqn=fqn)
        if dtype not in DTYPES:
            raise FormatError(f"{fqn} has the dtype {dtype!r}, which no stored tensor has", fqn=fqn)
        if alias is None:
            return Place(fqn, fqn, dtype, shape, contiguous_stride(shape), 0, whole=True)
        _check_inside(alias, shape)
        whole = (alias.shape, alias.stride, alias.offset) == (shape, contiguous_stride(shape), 0)
        return Place(fqn, owner, dtype, alias.shape, alias.stride, alias.offset, whole)


def _check_inside(alias: Alias, shape: tuple[int, ...]) -> None:
    numel = 1
    for size in shape:
        numel *= size
    sane = len(alias.shape) == len(alias.stride) and min((*alias.shape, *alias.stride, alias.offset), default=0) >= 0
    last = alias.offset + sum((n - 1) * s for n, s in zip(alias.shape, alias.stride, strict=False) if n > 0)
    if not sane or (0 not in alias.shape and last >= numel):
        raise FormatError(f"{alias.fqn} shares memory outside {alias.owner}", fqn=alias.fqn)
