"""DTensors whose local tensors are composite: their inner tensors as parts of those of the whole tensor.

Invariants
  SHARDEDKIND-1  Every rank of a mesh describes such a tensor alike, also a rank that keeps no part of it, or an ordinary
      tensor.
  SHARDEDKIND-2  What N ranks stored of it are the inner tensors that one rank would have stored, if all ranks keep one class.
  SHARDEDKIND-3  If it is not known which parts of the whole inner tensors a rank holds, every rank stores its local tensor as
      it is. Only a rank that holds the same part then gets it back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from checkpointd.errors import StateError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd_client.capture.tensor_kinds import tiles
from checkpointd_client.capture.tensor_kinds.blocks import BLOCKS, inner_held, range_of
from checkpointd_client.capture.tensor_kinds.classes import TensorClasses
from checkpointd_client.capture.tensor_kinds.contexts import has_fractions
from checkpointd_client.capture.tensor_kinds.kind import Apart, TensorKind
from checkpointd_client.capture.tensor_kinds.low_bit import RowSpan, spans
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard, ReplicaGroup, held_by, mesh_group, replicated

ROWS = "rows"
"""The kind of a tensor whose rows are stored in several ways: its inner tensors have consecutive rows of it."""

OWN_PART = "part"
"""The kind of a tensor of which every rank has stored its own part as it is. Its only inner tensor is that part, `LOCAL`."""
LOCAL = "local"

PLAIN = "plain"
"""The name of the only inner tensor of rows that are an ordinary tensor."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of the whole tensor. `kind`: None if they are an ordinary tensor. `inner`: by name, this rank's memory
    and the part that it is of the inner tensor of these rows. `name`: a part of the FQNs; empty if there is one part alone.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: TensorKind | None
    context: object
    inner: dict[str, tuple[torch.Tensor, LocalShard]]

    def node(self, inner: tuple[tuple[str, tree.Node], ...], context: tree.Node) -> tree.Node:
        """The node of these rows."""
        if self.kind is None:
            return inner[0][1]
        return tree.Composite(self.kind.name, self.shape, str(self.dtype).removeprefix("torch."), inner, context)


@dataclass(frozen=True, slots=True)
class OwnPart:
    """This rank's part of a DTensor, to be stored as it is. `boxes`: the result of `boxes_of`."""

    local: torch.Tensor
    kind: TensorKind
    boxes: list[object]


def boxes_of(held: LocalShard) -> list[object]:
    """The part of the whole tensor that a rank holds, as plain values: the offsets and the sizes of its boxes."""
    return [[list(part.box.offsets), list(part.box.sizes)] for part in held.parts]


def joined(parts: Sequence[Part], nodes: Sequence[tree.Node], value: Any) -> tree.Node:
    """The node of the whole tensor `value`."""
    if len(parts) == 1:
        return nodes[0]
    inner = tuple((part.name, node) for part, node in zip(parts, nodes, strict=True))
    return tree.Composite(ROWS, tuple(value.shape), str(value.dtype).removeprefix("torch."), inner)


def parts_of(value: Any, fqn: str, classes: TensorClasses, optimizer: Any, owner: Any) -> list[Part] | OwnPart | None:
    """How a DTensor is stored; None if it is one ordinary tensor. StateError if it cannot be.

    `optimizer`: one of torchao's, in whose state it lies, or None. `owner`: the parameter whose state it is.
    """
    local = value._local_tensor
    kind = None if type(local) is torch.Tensor else classes.kind_of(local)
    of_optimizer = optimizer is not None and owner is not None and owner.shape == value.shape and hasattr(owner, "_spec")
    if kind is None and not of_optimizer:
        return None
    held = held_by(value, fqn)
    try:
        if not of_optimizer:
            assert kind is not None
            group = mesh_group(value) or ReplicaGroup(0, 1)
            if kind.name not in BLOCKS:
                return _tiled(value, kind, held, group)
            return [_part("", RowSpan(0, held.shape[0] if held.shape else 1, kind, local), local, held, group)]
        found = spans(optimizer, owner, fqn.rpartition(".")[2], classes)
        if not any(span.kind for span in found):
            return None
        _check_own(found, held, kind)
        return _by_span(value, found, held)
    except ValueError as error:
        name = type(local).__name__
        raise StateError(f"{fqn}: this DTensor of {name} cannot be stored: {error}. Shard it by rows, with Shard(0)") from error


def _tiled(value: Any, kind: TensorKind, held: LocalShard, group: ReplicaGroup) -> list[Part] | OwnPart:
    """A DTensor whose class keeps no blocks of consecutive elements."""
    apart = kind.apart(value._local_tensor)
    found = _inner_parts(value, kind, apart, held, group)
    if found is None:
        return OwnPart(value._local_tensor, kind, boxes_of(held))
    inner = {name: (apart.inner[name].detach(), part) for name, part in found.items()}
    return [Part("", held.shape, value.dtype, kind, apart.context, inner)]


def _inner_parts(
    value: Any, kind: TensorKind, apart: Apart, held: LocalShard, group: ReplicaGroup
) -> dict[str, LocalShard] | None:
    """The part that this rank holds of each inner tensor of the whole tensor; None if that is not known, on all ranks."""
    split: list[tuple[int, ...]] = [() for _ in held.shape]
    for ranks, placement in zip(value._spec.mesh.shape, value._spec.placements, strict=True):
        if ranks > 1 and not placement.is_replicate():
            split[placement.dim] += (ranks,)
    if not any(split):
        return {name: replicated(tuple(one.shape), group) for name, one in apart.inner.items()}
    if not tiles.is_tiled(kind.name, apart):
        # A rank that gets elements of other ranks has no other context than its own.
        are_parts = is_elementwise(apart, value._local_tensor) and not has_fractions(apart.context)
        return dict.fromkeys(apart.inner, held) if are_parts else None
    found = {name: tiles.items_held(held, split, tuple(one.shape)) for name, one in apart.inner.items()}
    known = {name: part for name, part in found.items() if part is not None}
    return known if len(known) == len(found) else None


def is_elementwise(apart: Apart, tensor: torch.Tensor) -> bool:
    """Whether all inner tensors have the shape of their tensor."""
    return all(one.shape == tensor.shape for one in apart.inner.values())


def _check_own(found: Sequence[RowSpan], held: LocalShard, kind: TensorKind | None) -> None:
    """ValueError if this rank keeps another class than torchao's rule says: the other ranks then expect something else."""
    own = range_of(held)
    if own is None:
        raise ValueError("this rank holds other parts of it than consecutive whole rows")
    row = math.prod(held.shape[1:])
    for span in found:
        if own[0] < own[1] and span.start * row <= own[0] < span.stop * row and (span.kind is None) != (kind is None):
            raise ValueError("it is of another class than its optimizer makes for so many elements")


def _by_span(value: Any, found: Sequence[RowSpan], held: LocalShard) -> list[Part]:
    coordinate = tuple(value._spec.mesh.get_coordinate() or ())
    parts = []
    for number, span in enumerate(found):
        name = "" if len(found) == 1 else str(number)
        here = within(held, span.start, span.stop)
        among = ReplicaGroup(span.holders.index(coordinate), len(span.holders)) if coordinate in span.holders else None
        if span.kind is None:
            shape = (span.stop - span.start, *held.shape[1:])
            memory = value._local_tensor.detach() if here.parts else torch.empty((0, *shape[1:]), dtype=value.dtype)
            parts.append(Part(name, shape, value.dtype, None, None, {PLAIN: (memory, here)}))
        else:
            local = value._local_tensor if among is not None else None
            parts.append(_part(name, span, local, here, among))
    return parts


@lru_cache(maxsize=1 << 14)
def within(held: LocalShard, start: int, stop: int) -> LocalShard:
    """What `held`, of consecutive rows, holds of the rows from `start` to `stop`, as a tensor of their own."""
    shape = (stop - start, *held.shape[1:])
    parts = [
        LocalBox(shape, Box((part.box.offsets[0] - start, *part.box.offsets[1:]), part.box.sizes), part.at)
        for part in held.parts
        if start <= part.box.offsets[0] < stop
    ]
    return held if shape == held.shape else LocalShard(shape, tuple(parts), held.replica, held.replicas)


def _part(name: str, span: RowSpan, local: Any, held: LocalShard, among: ReplicaGroup | None) -> Part:
    """The rows of `span`, of which this rank keeps `local`, a composite tensor, or nothing."""
    assert span.kind is not None
    kind, blocks = span.kind, BLOCKS.get(span.kind.name)
    if blocks is None:
        raise ValueError(f"{kind.name} is no class of torchao's states")
    like = span.kind.apart(span.like)
    own = like.inner if local is None else kind.apart(local).inner
    count = span.like.numel()
    inner: dict[str, tuple[torch.Tensor, LocalShard]] = {}
    for key, memory in own.items():
        one = like.inner[key]
        size = count // one.numel() if one.numel() else 0
        here = inner_held(blocks, key, held, size, tuple(one.shape), among or ReplicaGroup(0, 1))
        if local is None:
            empty = tuple(0 for _ in here.shape[:1]) + here.shape[1:]
            memory, here = torch.empty(empty, dtype=one.dtype), LocalShard(here.shape, ())
        inner[key] = memory.detach(), here
    return Part(name, held.shape, span.like.dtype, kind, blocks.context(like.context, held.shape), inner)
