"""A checkpoint in DCP's form: tensors and values by flat names, made from the indexes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointd.errors import FormatError
from checkpointd.export.selection import Exported, StoredSourceTensor, alias_view, whole_view
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box, whole
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd_client.capture.dtypes import DTYPES
from checkpointd_client.capture.pickled import saved
from checkpointd_client.integrations.conversion.objects import holds_tensors
from checkpointd_client.integrations.conversion.paths import Path, leaves, name_of
from checkpointd_client.integrations.conversion.side_data import parts, plain_client_state
from checkpointd_client.integrations.dcp.about import About
from checkpointd_client.restore import content as merging
from checkpointd_client.restore.building import value_of


def is_whole(tensor: Exported) -> bool:
    """Whether `tensor` is all of its source, in the source's own order."""
    return tensor.view == whole_view(tensor.source.shape)


@dataclass(frozen=True, slots=True)
class DcpContent:
    """A checkpoint by DCP's flat names. `values` are plain values as nodes; `objects` are other values as torch.save wrote
    them.

    `left_out`: values that DCP cannot represent, namely those that differ between the ranks that saved them, numpy arrays, and
    tensors inside tuples, sets and the client state.
    """

    world: CheckpointView
    tensors: Mapping[str, Exported] = field(default_factory=dict)
    values: Mapping[str, tree.Node] = field(default_factory=dict)
    objects: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    client_state: tree.Dict = field(default_factory=lambda: tree.Dict("dict", ()))
    left_out: tuple[str, ...] = ()

    def about(self) -> About:
        """The step, metrics and client state, for which DCP's own format has no place."""
        commit = self.world.checkpoint.commit
        return About(step=commit.step, metrics=commit.metrics, client_state=tree.encode(self.client_state))

    def object_bytes(self, name: str) -> bytes:
        """The bytes of a value, as DCP's planner loads them."""
        return saved(value_of(self.values[name])) if name in self.values else self.objects[name]

    def boxes(self, tensor: Exported) -> list[Box]:
        """The boxes that DCP sees: those that the ranks stored; one box for a tensor that is a part of another one."""
        known = self.world.tensors.get(tensor.source.fqn) if tensor.source.rank is None and is_whole(tensor) else None
        boxes = [part.entry.box for part in known.parts if part.entry.box.numel()] if known else []
        return boxes or [whole(tensor.view.shape)]

    def metadata(self) -> Metadata:
        """The metadata as in `.metadata` of a DCP directory, without the places of the bytes."""
        described: dict[str, STORAGE_TYPES] = {name: BytesStorageMetadata() for name in (*self.values, *self.objects)}
        for name, tensor in self.tensors.items():
            described[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.source.dtype]),
                size=torch.Size(tensor.view.shape),
                chunks=[ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self.boxes(tensor)],
            )
        planner_data = {name: self.paths[name] for name in described if name in self.paths}
        return Metadata(described, planner_data=planner_data, storage_data={}, storage_meta=StorageMeta())


def content_of(world: CheckpointView) -> DcpContent:
    """The content that all ranks saved. FormatError if a tree is invalid."""
    merged = merging.merged_content(world, keep=None, alone=True)
    state, side_data = parts(merged.root)
    found = _FoundLeaves(world, merged, side_data.paths)
    found.add(leaves(state))
    objects = dict(side_data.objects)
    paths = found.paths | {name: side_data.paths.get(name, (name,)) for name in objects}
    client_state, tensors = plain_client_state(merged.root)
    left = (*sorted(merged.left), *found.left, *tensors)
    return DcpContent(world, found.tensors, found.values, objects, paths, client_state, left)


class _FoundLeaves:
    """The leaves of a state, sorted into tensors, plain values and values that are left out."""

    def __init__(self, world: CheckpointView, merged: merging.RankContent, told: Mapping[str, Path]) -> None:
        self.tensors: dict[str, Exported] = {}
        self.values: dict[str, tree.Node] = {}
        self.paths: dict[str, Path] = {}
        self.left: list[str] = []
        self._world, self._merged, self._told = world, merged, told
        self._aliases = {alias.fqn: alias for alias in merged.aliases}

    def add(self, found: Iterator[tuple[Path, tree.Node]] | Iterable[tuple[Path, tree.Node]]) -> None:
        for path, node in found:
            name = name_of(path)
            if isinstance(node, tree.Tensor):
                self.tensors[name] = self._stored(name, node.fqn)
            elif holds_tensors(node):
                self.left.append(name)
                continue
            else:
                self.values[name] = node
            self.paths[name] = self._told.get(name, path)

    def _stored(self, name: str, fqn: str) -> Exported:
        alias = self._aliases.get(fqn)
        owner = alias.owner if alias is not None else fqn
        if owner not in self._merged.entries:
            raise FormatError(f"the state tree names {owner}, which no rank stored", fqn=owner)
        dtype, shape = self._merged.entries[owner]
        stored = self._merged.stored_as.get(owner, owner)
        source = StoredSourceTensor(stored, dtype, shape, self._merged.owners.get(owner))
        view = whole_view(source.shape) if alias is None else alias_view(alias, source.shape)
        return Exported(name, fqn, source, view)
