"""A snapshot's data beside its tensors. It arrives in parts, and is charged to its client."""

from __future__ import annotations

from dataclasses import dataclass, field

from checkpointd.daemon.accounts import Charge
from checkpointd.daemon.protocol import wire
from checkpointd.errors import UsageError
from checkpointd.layout.indexes import Alias

TEXT_COST = 80
"""Bytes that a string takes in addition to its characters."""


@dataclass(slots=True)
class ReceivedContents:
    """A snapshot's data beside its tensors, as far as it has arrived."""

    charge: Charge
    aliases: list[Alias] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    tree: bytearray = field(default_factory=bytearray)
    refused: bool = False

    def add(self, part: wire.Contents) -> None:
        """UsageError if the data is too long, SidecarFullError if there is no room for it. Later parts are then ignored."""
        if self.refused:
            return
        try:
            self._add(part)
        except BaseException:
            self.refused = True
            self.charge.release()
            self.tree, self.aliases, self.excluded = bytearray(), [], []
            raise

    def _add(self, part: wire.Contents) -> None:
        cost = sum(map(_alias_cost, part.aliases)) + sum(TEXT_COST + 4 * len(name) for name in part.excluded)
        # Twice, as parts and as one piece.
        cost += 2 * len(part.tree)
        if len(self.tree) + len(part.tree) > wire.TREE_BYTES_MAX:
            raise UsageError(f"a state's tree has more than {wire.TREE_BYTES_MAX} bytes: keep large objects out of the state")
        self.charge.resize(self.charge.nbytes + cost)
        self.aliases += part.aliases
        self.excluded += part.excluded
        self.tree += part.tree


def _alias_cost(alias: Alias) -> int:
    return 6 * TEXT_COST + 4 * len(alias.fqn) + 4 * len(alias.owner) + 80 * max(len(alias.shape), len(alias.stride))
