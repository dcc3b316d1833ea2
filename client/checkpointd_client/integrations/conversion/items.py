"""Turns the items of a DCP plan into a shard: tensors as boxes of global tensors, everything else in the state tree.

Invariants
  DCPITEM-1  For a tensor that this rank holds and another rank writes, this rank names an empty box. So the check of all plans
      also checks the dtype and shape on this rank.
  DCPITEM-2  The tree of each rank has everything that this rank holds, even if another rank writes it.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.pipeline.pages import page_buffer, page_up
from checkpointd.pipeline.shard import Bytes, Shard, ShardTensor, aligned
from checkpointd_client.capture.dtypes import DTYPES, NAMES, copy_bits
from checkpointd_client.integrations.conversion.objects import NotPlain, node_of
from checkpointd_client.integrations.conversion.paths import Path, state_tree
from checkpointd_client.integrations.conversion.side_data import SideData, root_node


@dataclass(frozen=True, slots=True)
class DcpBox:
    """A box of a tensor that ranks hold together."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return self.box.numel() * ITEM_BYTES[self.dtype]


def empty_box(fqn: str, dtype: str, shape: tuple[int, ...]) -> DcpBox:
    """A box without elements, which names a tensor that another rank writes. A tensor without dimensions has none."""
    none = (0,) * len(shape)
    return DcpBox(fqn, dtype, shape, Box(none, none))


def laid_out(pieces: Iterable[DcpBox]) -> tuple[tuple[ShardTensor, ...], Bytes]:
    """The pieces one after the other in a new buffer of whole pages."""
    tensors: list[ShardTensor] = []
    at = 0
    for p in pieces:
        tensors.append(ShardTensor(p.fqn, p.dtype, p.shape, p.box, "global", at, p.nbytes, ITEM_BYTES[p.dtype]))
        at += aligned(p.nbytes)
    return tuple(tensors), page_buffer(page_up(max(at, 1)))


def room(buffer: Bytes, tensor: ShardTensor) -> torch.Tensor:
    """The memory of `tensor` in `buffer`, as a tensor of its box."""
    flat = torch.from_numpy(buffer[tensor.offset : tensor.offset + tensor.nbytes])
    return flat.view(DTYPES[tensor.dtype]).view(tensor.box.sizes)


def shard_of(held: SavePlan, plan: SavePlan, planner: SavePlanner) -> tuple[Shard, tuple[str, ...]]:
    """The shard with a copy of the items in `plan`, and the names of values that are not plain.

    `held` lists everything that this rank has. StateError if a tensor has a dtype that cannot be stored, or contradicts the
    plan.
    """
    written = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
    pieces = [_piece(item) for item in written]
    tensors, buffer = laid_out(pieces + _named(held, pieces))
    for item, tensor in zip(written, tensors, strict=False):
        _copy(planner, item, room(buffer, tensor))
    items = {item.index.fqn: item for item in (*plan.items, *held.items)}
    root, strange = described({fqn: _leaf(item, planner) for fqn, item in items.items()}, _mapping(held))
    return Shard(buffer=buffer, tensors=tensors, tree=tree.encode(root)), strange


def _piece(item: WriteItem) -> DcpBox:
    data = item.tensor_data
    fqn = item.index.fqn
    if data is None:
        raise StateError(f"{fqn} is to be written as a tensor, but its plan does not describe the tensor")
    name = NAMES.get(data.properties.dtype)
    if name is None or data.properties.layout != torch.strided:
        raise StateError(f"{fqn}: a {data.properties.layout} tensor of {data.properties.dtype} cannot be stored")
    return DcpBox(fqn, name, tuple(data.size), Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))


def _named(held: SavePlan, pieces: Sequence[DcpBox]) -> list[DcpBox]:
    """Empty boxes of the tensors that this rank holds and another one writes (DCPITEM-1). One without dimensions has none."""
    named: dict[str, DcpBox] = {}
    written = {piece.fqn for piece in pieces}
    for item in held.items:
        if item.type != WriteItemType.BYTE_IO and item.index.fqn not in written:
            piece = _piece(item)
            if piece.shape:
                named[piece.fqn] = empty_box(piece.fqn, piece.dtype, piece.shape)
    return list(named.values())


def _copy(planner: SavePlanner, item: WriteItem, target: torch.Tensor) -> None:
    source = planner.resolve_data(item)
    if not isinstance(source, torch.Tensor):
        raise StateError(f"{item.index.fqn} is to be written as a tensor, but is a {type(source).__name__}")
    if source.shape != target.shape or source.dtype != target.dtype:
        raise StateError(
            f"{item.index.fqn} is {source.dtype}{list(source.shape)}, "
            f"but the plan says {target.dtype}{list(target.shape)}: did the state change while it was saved?"
        )
    with torch.no_grad():
        copy_bits(target, source.detach())


def _mapping(plan: SavePlan) -> Mapping[str, Path]:
    """DCP's own map from name to path, if its planner flattened the state."""
    return plan.planner_data if isinstance(plan.planner_data, dict) else {}


def _leaf(item: WriteItem, planner: SavePlanner) -> tree.Tensor | bytes:
    if item.type != WriteItemType.BYTE_IO:
        return tree.Tensor(item.index.fqn, bool(item.tensor_data and item.tensor_data.properties.requires_grad))
    data = planner.resolve_data(item)
    return data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)


def described(
    leaves: Mapping[str, tree.Tensor | bytes],
    paths: Mapping[str, Path],
    client_items: tuple[tuple[tree.Node, tree.Node], ...] = (),
) -> tuple[tree.Node, tuple[str, ...]]:
    """The whole tree of a rank, and the names of the values that are not plain.

    `leaves`: tensors, and values as torch.save wrote them. Plain values stand at their paths; other values, and the client
    state, stand beside the state.
    """
    nodes: dict[str, tree.Node] = {}
    objects: dict[str, bytes] = {}
    for fqn, leaf in leaves.items():
        try:
            nodes[fqn] = node_of(leaf, fqn) if isinstance(leaf, bytes) else leaf
        except NotPlain:
            assert isinstance(leaf, bytes)  # node_of had it
            objects[fqn] = leaf
    state, untold = state_tree({fqn: (paths.get(fqn, (fqn,)), node) for fqn, node in nodes.items()})
    untold |= {fqn: paths[fqn] for fqn in objects if fqn in paths and paths[fqn] != (fqn,)}
    return root_node(state, SideData(objects, untold), client_items), tuple(objects)
