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
from checkpointd_client.integrations.conversion.marks import parts, plain_client_state
from checkpointd_client.integrations.conversion.objects import holds_tensors
from checkpointd_client.integrations.conversion.paths import Path, leaves, name_of
from checkpointd_client.integrations.dcp.about import About
from checkpointd_client.restore import content as merging
from checkpointd_client.restore.building import value_of


def is_whole(tensor: Exported) -> bool:
    """Whether it is all of its source, as that lies there."""
    return tensor.view == whole_view(tensor.source.shape)


@dataclass(frozen=True, slots=True)
class DcpContent:
    """`values` are plain ones, as nodes; `objects` as torch.save wrote them. `left_out`: what DCP has no place for, namely what
    differs between the ranks that saved it, numpy arrays, tensors inside tuples and sets, and those in client_state.
    """

    world: CheckpointView
    tensors: Mapping[str, Exported] = field(default_factory=dict)
    values: Mapping[str, tree.Node] = field(default_factory=dict)
    objects: Mapping[str, bytes] = field(default_factory=dict)
    paths: Mapping[str, Path] = field(default_factory=dict)
    client_state: tree.Dict = field(default_factory=lambda: tree.Dict("dict", ()))
    left_out: tuple[str, ...] = ()

    def about(self) -> About:
        """What DCP has no place for, and a directory says of the checkpoint beside it."""
        outcome = self.world.checkpoint.outcome
        return About(step=outcome.step, metrics=outcome.metrics, client_state=tree.encode(self.client_state))

    def object_bytes(self, name: str) -> bytes:
        """A value as DCP's planner loads it."""
        return saved(value_of(self.values[name])) if name in self.values else self.objects[name]

    def boxes(self, tensor: Exported) -> list[Box]:
        """The boxes that DCP is told of: those that the ranks stored, one for a tensor that lies in another one."""
        known = self.world.tensors.get(tensor.source.fqn) if tensor.source.rank is None and is_whole(tensor) else None
        boxes = [part.entry.box for part in known.parts if part.entry.box.numel()] if known else []
        return boxes or [whole(tensor.view.shape)]

    def metadata(self) -> Metadata:
        """What `.metadata` is to a DCP directory, without the places of the bytes."""
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
    """What all ranks saved together; FormatError where a tree cannot be one."""
    merged = merging.merged_content(world, keep=None, alone=True)
    state, marks = parts(merged.root)
    found = _FoundLeaves(world, merged, marks.paths)
    found.add(leaves(state))
    objects = dict(marks.objects)
    paths = found.paths | {name: marks.paths.get(name, (name,)) for name in objects}
    client_state, tensors = plain_client_state(merged.root)
    left = (*sorted(merged.left), *found.left, *tensors)
    return DcpContent(world, found.tensors, found.values, objects, paths, client_state, left)


class _FoundLeaves:
    """The leaves of a state, told apart."""

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
        source = StoredSourceTensor(owner, dtype, shape, self._merged.owners.get(owner))
        view = whole_view(source.shape) if alias is None else alias_view(alias, source.shape)
        return Exported(name, fqn, source, view)
