"""Where a load reads from: the store. (The other source is the sidecar's memory: `held.py`.)"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from checkpointd.config import LoadConfig, Ranks
from checkpointd.errors import DamagedError
from checkpointd.layout.manifest import Index
from checkpointd.pipeline.catalog import Checkpoint
from checkpointd.pipeline.load import Sink, read_index, read_tensors
from checkpointd.pipeline.world import Want, World, read_boxes, read_world
from checkpointd.store.base import Store
from checkpointd_client.content import Content, merged_content, own_content
from checkpointd_client.dtypes import DTYPES
from checkpointd_client.sinks import box_sink, sink_for
from checkpointd_client.slots import Target
from checkpointd_client.writer import Writer


class Source(Protocol):
    """One candidate as one rank sees it."""

    @property
    def tag(self) -> str: ...

    @property
    def step(self) -> int: ...

    @property
    def kind(self) -> Literal["store", "memory"]: ...

    def content(self) -> Content:
        """What it holds for this rank."""
        ...

    def more(self) -> Content | None:
        """The same with what other ranks saved and this one did not; None where there is no more."""
        ...

    def has_elsewhere(self, places: Sequence[str], content: Content) -> bool:
        """Whether another rank saved something right below one of `places`, where this one saved nothing."""
        ...

    def verify(self, targets: Sequence[Target], content: Content) -> None:
        """Raise what is wrong with the bytes of `targets`; touch none."""
        ...

    def fill(self, targets: Sequence[Target], content: Content) -> None:
        """Read them in. DamagedError where they are not what they were a moment ago."""
        ...


def stands_below(places: Sequence[str], content: Content) -> bool:
    """Whether a tensor is stored right below one of `places`."""
    return bool(places) and not {fqn.rpartition(".")[0] for fqn in content.entries}.isdisjoint(places)


def wants(targets: Iterable[Target], content: Content, *, fill: bool) -> list[Want]:
    """The boxes to read, with sinks where they are to be filled."""
    return [
        Want(
            target.fqn,
            box,
            box_sink(view, box, content.entries[target.fqn][0]) if fill else None,
            content.owners.get(target.fqn),
        )
        for target in targets
        for box, view in target.boxes()
    ]


@dataclass(slots=True)
class StoredSource:
    """A checkpoint in the store, as many indexes of it as this rank needs."""

    store: Store
    writer: Writer
    config: LoadConfig
    timeout_s: float
    ranks: Ranks
    checkpoint: Checkpoint
    kind: Literal["store", "memory"] = "store"
    _index: Index | None = None
    """This rank's, where it holds nothing together with other ranks: then nobody else's is needed."""
    _world: World = field(init=False)

    def __post_init__(self) -> None:
        if self._same_world:
            index = self.writer.call(read_index(self.store, self.checkpoint, self.ranks.rank), self.timeout_s)
            if all(entry.scope == "rank" for entry in index.tensors):
                self._index, self._world = index, World(self.checkpoint, {self.ranks.rank: index})
                return
        self._world = self.writer.call(read_world(self.store, self.checkpoint, self.config), self.timeout_s)

    @property
    def tag(self) -> str:
        return self.checkpoint.tag

    @property
    def step(self) -> int:
        return self.checkpoint.outcome.step

    @property
    def _same_world(self) -> bool:
        return self.checkpoint.outcome.world_size == self.ranks.world_size

    def content(self) -> Content:
        if self._same_world:
            return own_content(self._world, self.ranks.rank)
        return merged_content(self._world, keep=None, alone=self.ranks.world_size == 1)

    def more(self) -> Content | None:
        if not self._same_world or self.ranks.world_size == 1:
            return None
        if self._index is not None:  # layers may have moved to this rank from another one, that shares nothing with it
            self._index = None
            self._world = self.writer.call(read_world(self.store, self.checkpoint, self.config), self.timeout_s)
        return merged_content(self._world, keep=self.ranks.rank, alone=False)

    def has_elsewhere(self, places: Sequence[str], content: Content) -> bool:
        return stands_below(places, content)

    def verify(self, targets: Sequence[Target], content: Content) -> None:
        damage = self._read(targets, content, fill=False)
        if damage:
            raise damage[0]

    def fill(self, targets: Sequence[Target], content: Content) -> None:
        damage = self._read(targets, content, fill=True)
        if damage:
            raise DamagedError(f"{damage[0]}; it was whole a moment ago, so the objects are now loaded in part: load again")

    def _read(self, targets: Sequence[Target], content: Content, *, fill: bool) -> list[DamagedError]:
        index = self._index
        if index is not None and all(_is_plain(target, content) for target in targets):
            return self._read_whole(index, targets, content, fill=fill)
        found = wants(targets, content, fill=fill)
        return self.writer.call_while_moving(
            lambda on_bytes: read_boxes(self.store, self._world, found, self.config, on_bytes), self.timeout_s
        )

    def _read_whole(self, index: Index, targets: Sequence[Target], content: Content, *, fill: bool) -> list[DamagedError]:
        """Whole tensors of this rank go from the chunks to their memory as rows of bytes, with nothing to be cut."""
        sinks: dict[str, Sink | None] = {
            target.fqn: sink_for(target.tensor, content.entries[target.fqn][0]) if fill else None for target in targets
        }
        return self.writer.call_while_moving(
            lambda on_bytes: read_tensors(self.store, self.checkpoint.prefix, index, sinks, self.config, on_bytes),
            self.timeout_s,
        )


def _is_plain(target: Target, content: Content) -> bool:
    return target.held is None and target.tensor.dtype == DTYPES[content.entries[target.fqn][0]]
