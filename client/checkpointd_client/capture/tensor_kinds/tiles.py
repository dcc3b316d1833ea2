"""Classes of tensors that keep an item for each tile of elements, such as torchao's quantized weights.

A tile is a box of consecutive elements: a row of a tensor with a scale for each row, 1 x 32 elements of an `MXTensor`, or all
elements of a tensor with one scale. If each tile lies in the part of one rank, then the inner tensors of the ranks are parts
of the inner tensors of the whole tensor, which has the same tiles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from checkpointd.layout.boxes import Box
from checkpointd_client.capture.tensor_kinds.kind import Apart
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard

TILED: frozenset[str] = frozenset(
    {
        "torchao.quantization:Float8Tensor",
        "torchao.quantization:Int8Tensor",
        "torchao.quantization:IntxUnpackedToInt8Tensor",
        "torchao.prototype.mx_formats.mx_tensor:MXTensor",
        "torchao.prototype.mx_formats.nvfp4_tensor:NVFP4Tensor",
    }
)
"""The names of the classes."""

_ITEMS = frozenset({"qdata", "scale", "zero_point"})
"""The inner tensors that have an item for each tile. `qdata` has one for each element, or for two that share a byte."""
_SIZES = "block_size"
_ROWS_MIN = 2
"""With fewer rows on a rank, a scale for each row looks like one scale for the whole part."""


def is_tiled(kind: str, apart: Apart) -> bool:
    """Whether every inner tensor of this tensor has an item for each tile, in the order of the elements."""
    is_swizzled = isinstance(apart.context, dict) and bool(apart.context.get("is_swizzled_scales"))
    return kind in TILED and apart.inner.keys() <= _ITEMS and not is_swizzled


def essence(context: Any) -> Any:
    """What must be equal for inner tensors to mean the same: all but the sizes of tiles, which the shapes tell."""
    if not isinstance(context, dict):
        return context
    return {key: value for key, value in context.items() if key != _SIZES or isinstance(value, int)}


def items_held(held: LocalShard, split: Sequence[tuple[int, ...]], inner: tuple[int, ...]) -> LocalShard | None:
    """The part that this rank's inner tensor, of shape `inner`, is of the whole tensor's. None if the tiles of other ranks may
    have other sizes.

    `split`: for each dimension of the tensor, the sizes of the mesh dimensions that split it.
    """
    if len(held.parts) != 1 or len(inner) != len(held.shape):
        return None
    box = held.parts[0].box
    shape, offsets = [], []
    for size, ranks, start, count, items in zip(held.shape, split, box.offsets, box.sizes, inner, strict=True):
        if not items or count % items:
            return None
        tile = count // items
        if not _is_alike_on_all(size, ranks, tile):
            return None
        shape.append(size // tile)
        offsets.append(start // tile)
    return _of(held, tuple(shape), tuple(offsets), inner)


def _is_alike_on_all(size: int, ranks: tuple[int, ...], tile: int) -> bool:
    """Whether every rank sees tiles of this size in a dimension of `size` elements. All ranks come to the same result."""
    if size % math.prod(ranks) == 0:
        return True  # their parts have the same shape
    chunk = -(-size // ranks[0])
    return tile == 1 and len(ranks) == 1 and size - chunk * (ranks[0] - 1) >= _ROWS_MIN


def items_wanted(held: LocalShard, stored: tuple[int, ...], inner: tuple[int, ...]) -> LocalShard | None:
    """The items of a stored inner tensor, of shape `stored`, that belong to the elements of this rank. This rank's own inner
    tensor has the shape `inner`. None if the tiles do not fit each other.

    There may be several items for each of `inner`, which must then be equal.
    """
    if len(held.parts) != 1 or not len(inner) == len(stored) == len(held.shape):
        return None
    box = held.parts[0].box
    offsets, sizes = [], []
    for size, start, count, had, has in zip(held.shape, box.offsets, box.sizes, stored, inner, strict=True):
        if not had or not has or size % had or count % has:
            return None
        tile, own = size // had, count // has
        first, last = start // tile, -(-(start + count) // tile)
        is_inside_one = has == 1 and last - first == 1
        if not is_inside_one and (start % tile or own % tile):
            return None
        offsets.append(first)
        sizes.append(last - first)
    return _of(held, stored, tuple(offsets), tuple(sizes))


def _of(held: LocalShard, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> LocalShard:
    part = LocalBox(shape, Box(offsets, sizes), (0,) * len(shape))
    return LocalShard(shape, (part,), held.replica, held.replicas)


def common(items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor | None:
    """A tensor of `shape` with one item for each box of equal `items`; None if items of one box differ, or do not fit."""
    if len(shape) != items.dim() or any(not n or size % n for size, n in zip(items.shape, shape, strict=True)):
        return None
    boxes = items.reshape([k for size, n in zip(items.shape, shape, strict=True) for k in (n, size // n)])
    first = boxes[(slice(None), slice(0, 1)) * len(shape)]
    again = first.expand(boxes.shape).reshape(items.shape)
    return first.reshape(tuple(shape)) if _bits(again).equal(_bits(items)) else None


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def filled(live: Apart, made: Apart) -> bool:
    """Fill the inner tensors of `live` from those of `made`, of the same class and shape, if the items of `made` are equal in
    each tile of `live`. False, and nothing is filled, if not.
    """
    if live.inner.keys() != made.inner.keys() or essence(live.context) != essence(made.context):
        return False
    found = {name: common(one, live.inner[name].shape) for name, one in made.inner.items()}
    if any(one is None or one.dtype != live.inner[name].dtype for name, one in found.items()):
        return False
    for name, one in found.items():
        if one is not None:
            live.inner[name].copy_(one)
    return True
