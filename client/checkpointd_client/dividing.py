"""What of a tensor this rank writes, where other ranks hold the same of it: without asking anybody.

Replicas of a box divide it: every element is written by exactly one of them. What this says depends on what is held, FQN and
item size alone, so every rank answers alike for all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

from checkpointd.layout.boxes import Box
from checkpointd_client.sharding import Held, Part

SLICED_BYTES_MIN = 64 << 10
"""Replicas share a box of at least this many bytes; a smaller one is written whole by one of them."""
_KNOWN_MAX = 1 << 16

_written: dict[str, tuple[Held, int, tuple[Part, ...]]] = {}


def written_parts(fqn: str, held: Held, itemsize: int) -> tuple[Part, ...]:
    """What this rank writes of the tensor. A rank that writes nothing of it names an empty box, so that what it takes the
    tensor for is compared with the others all the same; a tensor of no dimensions has no such box, and gives nothing.
    """
    known = _written.get(fqn)
    if known is not None and known[0] is held and known[1] == itemsize:
        return known[2]
    if len(_written) >= _KNOWN_MAX:
        _written.clear()
    made = tuple(_slices(fqn, held, itemsize)) or _nothing(held.shape)
    _written[fqn] = (held, itemsize, made)
    return made


def _slices(fqn: str, held: Held, itemsize: int) -> Iterable[Part]:
    if held.replicas == 1:
        yield from held.parts
        return
    chosen = 0 if held.first_writes else xxhash.xxh3_64_intdigest(fqn.encode()) % held.replicas
    for part in held.parts:
        if held.first_writes or part.box.numel() * itemsize < SLICED_BYTES_MIN:
            if chosen == held.replica:
                yield part
        elif (mine := slice_of(part, held.replica, held.replicas)) is not None:
            yield mine


def slice_of(part: Part, index: int, count: int) -> Part | None:
    """The `index`th of `count` near-equal slices of a box: along dimension 0, or the longest where that is too short."""
    sizes, offsets = part.box.sizes, part.box.offsets
    dim = 0 if sizes[0] >= count else max(range(len(sizes)), key=sizes.__getitem__)
    start, stop = sizes[dim] * index // count, sizes[dim] * (index + 1) // count
    if start == stop:
        return None

    def put(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:dim], value, *values[dim + 1 :])

    box = Box(put(offsets, offsets[dim] + start), put(sizes, stop - start))
    return Part(part.shape, box, put(part.at, part.at[dim] + start), part.row)


def _nothing(shape: tuple[int, ...]) -> tuple[Part, ...]:
    zeros = (0,) * len(shape)
    return (Part(shape, Box(zeros, zeros), zeros),) if shape else ()
