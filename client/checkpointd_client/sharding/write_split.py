"""Divides a replicated tensor among its ranks, without communication; gives the written part of this rank.

Exactly one replica writes each element. The division depends only on the local shard, the FQN and the item size, so every rank
computes the same division.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from checkpointd.layout.boxes import Box
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard

SLICED_BYTES_MIN = 64 << 10
"""Replicas divide a box of at least this many bytes. One of them writes a smaller box whole."""
TINY_BYTES_MAX = 4 << 10
"""The first replica writes all boxes of at most this many bytes, such as the step counts of an optimizer: then a rank that
loads finds them in one index."""
HALVED_BYTES_MIN = 4 << 20
"""A box of whole rows is written as two halves from this size on. A smaller box is not worth a second entry in the index."""
HALVED_ROW_BYTES_MIN = 4096
"""Boxes with shorter rows are not halved: copies of such short pieces are slow."""
_KNOWN_MAX = 1 << 16

_written: dict[str, tuple[LocalShard, int, tuple[LocalBox, ...]]] = {}


def written_parts(fqn: str, held: LocalShard, itemsize: int) -> tuple[LocalBox, ...]:
    """The boxes of the tensor that this rank writes. A rank that writes no element names an empty box, so that its shape and
    dtype of the tensor are still compared with those of the other ranks. A scalar has no empty box, so the result is empty.
    """
    known = _written.get(fqn)
    if known is not None and known[0] is held and known[1] == itemsize:
        return known[2]
    if len(_written) >= _KNOWN_MAX:
        _written.clear()
    slices = _slices(fqn, held, itemsize)
    made = tuple(half for part in slices for half in _halves(part, itemsize)) or _nothing(held.shape)
    _written[fqn] = (held, itemsize, made)
    return made


def _slices(fqn: str, held: LocalShard, itemsize: int) -> Iterable[LocalBox]:
    if held.replicas == 1:
        yield from held.parts
        return
    is_tiny = sum(part.box.numel() for part in held.parts) * itemsize <= TINY_BYTES_MAX
    chosen = 0 if held.first_writes or is_tiny else xxhash.xxh3_64_intdigest(fqn.encode()) % held.replicas
    for part in held.parts:
        if held.first_writes or part.box.numel() * itemsize < SLICED_BYTES_MIN:
            if chosen == held.replica:
                yield part
        elif (mine := slice_of(part, held.replica, held.replicas)) is not None:
            yield mine


def _halves(part: LocalBox, itemsize: int) -> Iterable[LocalBox]:
    """A large box of whole rows as its left and its right half: a rank that loads some columns, as under tensor parallelism,
    then reads fewer bytes that it does not need.
    """
    sizes, offsets = part.box.sizes, part.box.offsets
    wide = len(sizes) == 2 and sizes[1] == part.shape[1] and part.row is None
    if not wide or part.box.numel() * itemsize < HALVED_BYTES_MIN or sizes[1] * itemsize < HALVED_ROW_BYTES_MIN:
        return (part,)
    middle = sizes[1] // 2
    left = LocalBox(part.shape, Box(offsets, (sizes[0], middle)), part.at)
    rest = sizes[0], sizes[1] - middle
    right = LocalBox(part.shape, Box((offsets[0], offsets[1] + middle), rest), (part.at[0], part.at[1] + middle))
    return left, right


def slice_of(part: LocalBox, index: int, count: int) -> LocalBox | None:
    """The `index`th of `count` near-equal slices of a box: along dimension 0, or along the longest if that is too short."""
    sizes, offsets = part.box.sizes, part.box.offsets
    dim = 0 if sizes[0] >= count else max(range(len(sizes)), key=sizes.__getitem__)
    start, stop = sizes[dim] * index // count, sizes[dim] * (index + 1) // count
    if start == stop:
        return None

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    box = Box(put(offsets, offsets[dim] + start), put(sizes, stop - start))
    return LocalBox(part.shape, box, put(part.at, part.at[dim] + start), part.row)


def _nothing(shape: tuple[int, ...]) -> tuple[LocalBox, ...]:
    zeros = (0,) * len(shape)
    return (LocalBox(shape, Box(zeros, zeros), zeros),) if shape else ()
