"""Objects that choose their load targets once the stored content is known, because their state has a form of its own."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from checkpointd.layout import tree
from checkpointd_client.capture import scalars
from checkpointd_client.restore.building import value_of
from checkpointd_client.restore.stored import Stored

Described = Mapping[Hashable, Any]
"""The stored state: nested dicts and lists of plain values, with a StoredTensor for each tensor and array."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Dtype by name, and global shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class LoadTargets:
    """`state` is loaded into, as by `Checkpointer.load`; stored values that it does not have are ignored. `faults`: the reasons
    why it cannot be loaded.
    """

    state: dict[str, Any]
    faults: list[str] = field(default_factory=list)


@runtime_checkable
class TargetChooser(Protocol):
    """A load may call it several times, for one checkpoint after the other. The places of the last call are filled."""

    def places(self, stored: Described) -> LoadTargets:
        """The targets for the state `stored`. Must not change any object of the user's."""
        ...


def described(stored: Stored) -> Described:
    """The state of a checkpoint. FormatError if it contradicts itself."""

    def leaf(node: tree.Node) -> object:
        if not isinstance(node, tree.Tensor | tree.Array):
            return scalars.decode(node, stand_in=True)
        place = stored.place(node.fqn)
        return StoredTensor(place.dtype, place.shape)

    return {key: value_of(child, leaf) for key, child in stored.children(stored.state, stand_in=True)}
