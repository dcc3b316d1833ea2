"""The local shard of a DTensor on this rank and its replicas, without communication.

Invariants
  SHARDING-1  The local shards described here are exactly the parts that torch gave the ranks. Two ranks hold the same elements
      only as replicas.
  SHARDING-2  All results depend only on mesh, placements, shape, FQN and item size. So every rank computes the same results for
      all ranks.

For each dimension, runs describe the indices that a rank holds, in the order in which they lie in the local tensor.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from checkpointd.errors import StateError
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.strides import stride_in_order_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Runs = tuple[tuple[int, int], ...]
"""Pairs of the first index and the count, in order."""

_KNOWN_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor of global `shape`, and the place `at` where it begins in the local tensor.

    `row`: for a one-dimensional local tensor, a start and sizes. `at` then counts in the elements from that start on, viewed as
    a tensor of these sizes.
    """

    shape: tuple[int, ...]
    box: Box
    at: tuple[int, ...]
    row: tuple[int, tuple[int, ...]] | None = None

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The view of `local` that holds this box."""
        if 0 in self.box.sizes:
            return local.new_empty(self.box.sizes)
        if self.row is not None:
            local = local.narrow(0, self.row[0], math.prod(self.row[1])).view(self.row[1])
        for dim, (start, size) in enumerate(zip(self.at, self.box.sizes, strict=True)):
            if size != local.shape[dim]:
                local = local.narrow(dim, start, size)
        return local


@dataclass(frozen=True, eq=False, slots=True)
class LocalShard:
    """The parts of a tensor of global `shape` that this rank holds. It is number `replica` of `replicas` with the same parts.

    With `first_writes`, replica 0 writes all of them: the others will take their values from it.
    """

    shape: tuple[int, ...]
    parts: tuple[LocalBox, ...]
    replica: int = 0
    replicas: int = 1
    first_writes: bool = False

    def alike(self, other: LocalShard) -> bool:
        """Whether both describe the same elements on the same ranks."""
        mine = (self.shape, self.parts, self.replica, self.replicas, self.first_writes)
        return self is other or mine == (other.shape, other.parts, other.replica, other.replicas, other.first_writes)

    @property
    def is_whole(self) -> bool:
        """Whether the local tensor is the global one."""
        return len(self.parts) == 1 and self.parts[0].box == whole(self.shape)


@dataclass(frozen=True, eq=False, slots=True)
class FlatShard:
    """A range of the elements of a tensor, in a one-dimensional local tensor: FullyShardedDataParallel keeps parameters so, and
    optimizers their state.

    `local` is the detached local tensor. `parameter` is the flat tensor that contains it, from `start` on. `holders` are the
    ranks that hold some elements of the tensor.
    """

    local: torch.Tensor
    held: LocalShard
    parameter: torch.Tensor
    start: int
    holders: ReplicaGroup

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        return self.local.device

    @property
    def requires_grad(self) -> bool:
        return self.parameter.requires_grad

    def is_floating_point(self) -> bool:
        return self.local.is_floating_point()

    def like(self, dtype: torch.dtype) -> FlatShard:
        """A new FlatShard for the same part, of `dtype` and with arbitrary content."""
        local = torch.empty_like(self.local, dtype=dtype)
        return FlatShard(local, self.held, local, self.start, self.holders)


# --- the local shard of a rank of a mesh -----------------------------------------------------------------------------


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether `value` is a DTensor. Does not import DTensors."""
    api = sys.modules.get("torch.distributed.tensor._api")
    return api is not None and isinstance(value, api.DTensor)


def dtensors_are_known() -> bool:
    """Whether this process has imported DTensors."""
    return "torch.distributed.tensor._api" in sys.modules


def is_sharded(value: object) -> TypeGuard[DTensor | FlatShard]:
    """Whether `value` is this rank's part of a tensor."""
    return type(value) is FlatShard or is_dtensor(value)


def local_of(tensor: DTensor | FlatShard) -> torch.Tensor:
    """This rank's part, detached. `to_local()` would go through autograd, at many times the cost."""
    if isinstance(tensor, FlatShard):
        return tensor.local
    local = tensor._local_tensor
    if type(local) is torch.Tensor:
        return local.detach()
    waiting = getattr(local, "wait", None)  # the result of a collective that may still run
    return (local if waiting is None else waiting()).detach()


_known: dict[int, tuple[object, LocalShard]] = {}
"""Local shards by the id() of the DTensor's spec. The spec is kept alive, so no other object gets its id()."""


def held_by(tensor: DTensor | FlatShard, fqn: str) -> LocalShard:
    """The local shard of a sharded tensor. StateError, naming `fqn`, if it cannot be described as boxes."""
    if isinstance(tensor, FlatShard):
        return tensor.held
    spec = tensor._spec
    known = _known.get(id(spec))
    if known is not None and known[0] is spec:
        return known[1]
    if len(_known) >= _KNOWN_MAX:
        _known.clear()
    held = _held(spec, tuple(tensor._local_tensor.shape), fqn)
    _known[id(spec)] = (spec, held)
    return held


def _held(spec: Any, local_shape: tuple[int, ...], fqn: str) -> LocalShard:
    shape, mesh = tuple(spec.shape), spec.mesh
    _check_placements(spec.placements, shape, fqn)
    coordinate = mesh.get_coordinate()
    if coordinate is None:  # a rank outside the mesh
        return LocalShard(shape, ())
    axes = axes_of(spec.placements)
    layout = MeshLayout(shape, tuple(mesh.shape), axes, _order_of(spec))
    rows = _rows_like(layout, tuple(coordinate), local_shape)
    if rows is None:
        raise StateError(
            f"{fqn}: this rank's part has the shape {list(local_shape)}, which does not fit the placements {spec.placements} "
            f"of a tensor of shape {list(shape)}: it was not split as torch splits tensors"
        )
    replica, replicas = 0, 1
    for size, at, axis in zip(mesh.shape, coordinate, axes, strict=True):
        if axis is None:
            replica, replicas = replica * size + at, replicas * size
    return LocalShard(shape, _parts(shape, rows), replica, replicas)


@dataclass(frozen=True, slots=True)
class Axis:
    """A mesh dimension that splits dimension `dim` of a tensor, after later mesh dimensions have split it into `pieces`."""

    dim: int
    pieces: int = 1


def axes_of(placements: Iterable[Any]) -> tuple[Axis | None, ...]:
    """How each dimension of a mesh splits a tensor with these placements; None for a dimension of replicas."""
    return tuple(
        None if placement.is_replicate() else Axis(placement.dim, int(getattr(placement, "split_factor", 1)))
        for placement in placements
    )


def _check_placements(placements: Iterable[Any], shape: tuple[int, ...], fqn: str) -> None:
    for placement in placements:
        if placement.is_partial():
            raise StateError(
                f"{fqn}: its placement is {placement}, a sum that is not done yet, so no rank holds its elements: "
                "redistribute it to Shard or Replicate before saving"
            )
        known = placement.is_replicate() or hasattr(placement, "dim")
        if not known or (hasattr(placement, "dim") and not 0 <= placement.dim < len(shape)):
            raise StateError(f"{fqn}: a DTensor with the placement {placement} cannot be stored by this version")


def _order_of(spec: Any) -> tuple[int, ...] | None:
    """The order in which the dimensions of the mesh split the tensor; None for the normal order, from the first to the last."""
    entries = getattr(spec, "shard_order", None)
    if not entries or any(_is_strided(placement) for placement in spec.placements):
        return None
    order = tuple(itertools.chain.from_iterable(tuple(entry.mesh_dims) for entry in entries))
    return None if list(order) == sorted(order) else order


def _is_strided(placement: Any) -> bool:
    return getattr(placement, "split_factor", 1) != 1


@dataclass(frozen=True, slots=True)
class MeshLayout:
    """How a mesh splits a tensor. `order`: the order of the mesh's dimensions; None means from the first to the last."""

    shape: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axes: tuple[Axis | None, ...]
    order: tuple[int, ...] | None = None


def _rows_like(layout: MeshLayout, coordinate: tuple[int, ...], local_shape: tuple[int, ...]) -> tuple[Runs, ...] | None:
    """The rows of the rank at `coordinate`, by the rule of `rows_of` that gives the shape of the local tensor; None if neither
    does.
    """
    for rows in (rows_of(layout, coordinate), rows_of(layout, coordinate, as_stated=True)):
        if (found := tuple(map(_length, rows))) == local_shape or (0 in found and 0 in local_shape):
            return rows
    return None


@lru_cache(maxsize=4096)
def rows_of(layout: MeshLayout, coordinate: tuple[int, ...], *, as_stated: bool = False) -> tuple[Runs, ...]:
    """For each dimension, the indices that the rank at `coordinate` holds, in their order in its local tensor.

    FSDP2 over tensor parallelism splits over a later dimension of the mesh first. Such splits are followed from right to left.
    `as_stated`: follow them from left to right, as torch reads such placements; for uneven sizes this gives other parts.
    """
    rows: list[Runs] = [((0, n),) if n else () for n in layout.shape]
    turned = not as_stated and _is_right_to_left(layout)
    for i in _turns(layout, turned=turned):
        axis = layout.axes[i]
        if axis is None:
            continue
        pieces = 1 if turned else axis.pieces
        chunks = (chunk(chunk(rows[axis.dim], pieces, k), layout.mesh_shape[i], coordinate[i]) for k in range(pieces))
        rows[axis.dim] = _joined(itertools.chain.from_iterable(chunks))
    return tuple(rows)


def _turns(layout: MeshLayout, *, turned: bool) -> Sequence[int]:
    """The dimensions of the mesh in the order in which they split the tensor."""
    if layout.order is not None:
        return layout.order
    dims = range(len(layout.axes))
    return sorted(dims, key=lambda i: (axis := layout.axes[i]) is not None and axis.pieces > 1) if turned else dims


def _is_right_to_left(layout: MeshLayout) -> bool:
    """Whether the pieces of every strided mesh dimension come from the later mesh dimensions that split the same dimension."""
    strided = [(i, axis) for i, axis in enumerate(layout.axes) if axis is not None and axis.pieces > 1]
    return all(axis.pieces == _plain_shards_after(layout, i, axis.dim) for i, axis in strided)


def _plain_shards_after(layout: MeshLayout, i: int, dim: int) -> int:
    later = zip(layout.mesh_shape[i + 1 :], layout.axes[i + 1 :], strict=True)
    return math.prod(n for n, axis in later if axis is not None and axis.dim == dim and axis.pieces == 1)


def chunk(runs: Runs, parts: int, index: int) -> Runs:
    """The `index`th of `parts` chunks, as torch.chunk cuts them: of equal size, except that the last ones may be smaller or
    empty.
    """
    total = _length(runs)
    size = -(-total // parts)
    start, stop = min(size * index, total), min(size * (index + 1), total)
    found: list[tuple[int, int]] = []
    at = 0
    for first, n in runs:
        low, high = max(start, at), min(stop, at + n)
        if low < high:
            found.append((first + low - at, high - low))
        at += n
    return _joined(found)


def _joined(runs: Iterable[tuple[int, int]]) -> Runs:
    made: list[tuple[int, int]] = []
    for first, n in runs:
        if made and sum(made[-1]) == first:
            made[-1] = (made[-1][0], made[-1][1] + n)
        else:
            made.append((first, n))
    return tuple(made)


def _length(runs: Runs) -> int:
    return sum(n for _, n in runs)


def _parts(shape: tuple[int, ...], rows: Sequence[Runs]) -> tuple[LocalBox, ...]:
    """The product of the runs of all dimensions."""
    placed = [list(zip(runs, itertools.accumulate((n for _, n in runs), initial=0), strict=False)) for runs in rows]
    return tuple(
        LocalBox(
            shape, Box(tuple(run[0] for run, _ in chosen), tuple(run[1] for run, _ in chosen)), tuple(at for _, at in chosen)
        )
        for chosen in itertools.product(*placed)
    )


# --- replicas -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """The number of ranks that hold the same elements, and this rank's number among them."""

    replica: int
    replicas: int

    def times(self, other: ReplicaGroup) -> ReplicaGroup:
        """The group in which each of these ranks is replaced by a group like `other`."""
        return ReplicaGroup(self.replica * other.replicas + other.replica, self.replicas * other.replicas)


ALONE = ReplicaGroup(0, 1)
"""The group of a value that no other rank has."""


@lru_cache(maxsize=1 << 14)
def spread(held: LocalShard, group: ReplicaGroup) -> LocalShard:
    """`held` with more replicas: every rank of `group` has the same tensor on a mesh of its own."""
    both = group.times(ReplicaGroup(held.replica, held.replicas))
    return LocalShard(held.shape, held.parts, both.replica, both.replicas, held.first_writes)


def group_of(process_group: Any) -> ReplicaGroup:
    """The ranks of a process group."""
    return ReplicaGroup(torch.distributed.get_rank(process_group), torch.distributed.get_world_size(process_group))


def mesh_group(tensor: DTensor) -> ReplicaGroup | None:
    """All ranks of the mesh of a DTensor as one group; None on a rank outside the mesh."""
    mesh = tensor._spec.mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    replica = 0
    for size, at in zip(mesh.shape, coordinate, strict=True):
        replica = replica * size + at
    return ReplicaGroup(replica, math.prod(mesh.shape))


@lru_cache(maxsize=1 << 14)
def replicated(shape: tuple[int, ...], group: ReplicaGroup, *, first_writes: bool = False) -> LocalShard:
    """The local shard of a plain tensor that every rank of `group` holds."""
    part = LocalBox(shape, whole(shape), (0,) * len(shape))
    return LocalShard(shape, (part,) if 0 not in shape else (), group.replica, group.replicas, first_writes)


def sharded_like(
    like: object, dtype: torch.dtype, device: torch.device, stride: tuple[int, ...] | None = None
) -> tuple[torch.Tensor, object]:
    """A new tensor of `dtype` with arbitrary content, sharded as `like`; returns its local part and itself. It is on the device
    of `like`, or on `device` if `like` is a meta tensor. `stride`: the strides of the whole tensor; by default those of `like`.
    """
    if type(like) is FlatShard:
        made_flat = like.like(dtype)
        return made_flat.local, made_flat
    assert is_dtensor(like)
    from torch.distributed.tensor import DTensor  # already imported, since `like` is a DTensor

    there = local_of(like)
    where = device if there.is_meta else there.device
    if stride is None:
        local = torch.empty_like(there, dtype=dtype, device=where, memory_format=torch.preserve_format)
    else:
        in_order = stride_in_order_of(stride, there.shape)
        local = torch.empty_strided(there.shape, in_order, dtype=dtype, device=where)
    # As FSDP2 does it, not with from_local, which would copy `local` to the mesh's kind of device: the shards that FSDP2
    # offloads are in host memory.
    meta = like._spec.tensor_meta
    assert meta is not None
    spec = replace(like._spec, tensor_meta=meta._replace(dtype=dtype, stride=meta.stride if stride is None else stride))
    return local, DTensor(local, spec, requires_grad=False)
