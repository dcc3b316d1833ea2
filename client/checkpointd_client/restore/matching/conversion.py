"""Loads a stored tensor into one of another class: 8-bit states into ordinary tensors and back, and other blocks.

The stored elements that belong to the target are read, with the whole blocks that they lie in, and turned into ordinary numbers
(the class's `dequantize`). The target takes them by its own `copy_`, which rounds to its blocks. If the class keeps its blocks
as `blocks.BLOCKS` says, a rank reads no other rows than its own. Of any other class it reads the whole tensor.

Invariants
  CONVERSION-1  A tensor is converted only with `cast`, or if it is the state of a low-bit optimizer of torchao, where the
      number of ranks decides on the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from checkpointd.errors import FormatError, StateError
from checkpointd.layout import tree
from checkpointd.layout.boxes import Box
from checkpointd_client.capture.dtypes import ALL, DTYPES, is_floating
from checkpointd_client.capture.tensor_kinds import contexts, four_bit
from checkpointd_client.capture.tensor_kinds.blocks import BLOCKS, Blocks
from checkpointd_client.capture.tensor_kinds.kind import OuterFacts, TensorKind
from checkpointd_client.capture.tensor_kinds.sharded import ROWS
from checkpointd_client.restore.bind import Binding, allocate
from checkpointd_client.restore.matching.context import Context, Conversion
from checkpointd_client.sharding.dtensor import LocalBox, LocalShard

Range = tuple[int, int]
"""The first element, and the one behind the last, in row-major order."""
Read = Callable[[], torch.Tensor]
"""The elements of a range as a row of ordinary numbers, once everything is filled."""


def convert(
    match: Context, node: tree.Node, live: torch.Tensor, wanted: Range, fill: Callable[[torch.Tensor], object], fqn: str
) -> None:
    """Read the range `wanted` of the tensor stored at `node`, and pass its elements to `fill`, which sets those of `live`.

    Notes a mismatch if it cannot be converted.
    """
    try:
        reads = _reads(match, node, wanted, fqn)
    except (StateError, ValueError) as error:
        match.mismatched.append(f"{fqn}: it cannot be converted: {error}")
        return

    def run() -> None:
        rows = [read() for read in reads]
        try:
            with torch.no_grad():
                fill(torch.cat(rows) if len(rows) != 1 else rows[0])
        except Exception as error:  # of the user's class
            raise StateError(f"{fqn}: it cannot be filled from the stored values: {type(error).__name__}: {error}") from error

    match.converted.append(Conversion(fqn, live, node, run))


def shape_of(match: Context, node: tree.Node) -> tuple[int, ...]:
    """The shape of the stored tensor at `node`; of a 4-bit parameter, the shape that it had before it was packed."""
    if isinstance(node, tree.Composite):
        return _unpacked(match, node) or node.shape
    return match.stored.place(node.fqn).shape if isinstance(node, tree.Tensor) else ()


def _unpacked(match: Context, node: tree.Composite) -> tuple[int, ...] | None:
    """The shape that a 4-bit parameter had before it was packed; None if it is not packed, or not known here."""
    if node.kind != four_bit.NAME:
        return None
    try:
        shape = match.classes.kind(node.kind).packed_shape(contexts.decode(node.context, match.classes.in_context))
    except StateError:  # the match tells it
        return None
    return tuple(shape) if isinstance(shape, list) else None


def _reads(match: Context, node: tree.Node, wanted: Range, fqn: str) -> list[Read]:
    if wanted[0] >= wanted[1]:
        return [lambda: torch.empty(0)]
    if isinstance(node, tree.Tensor):
        return [_plain(match, node, wanted)]
    assert isinstance(node, tree.Composite)
    if node.kind != ROWS:
        return [_composite(match, node, wanted, fqn)]
    reads: list[Read] = []
    start = 0
    for name, part in node.inner:
        if not isinstance(part, tree.Tensor | tree.Composite):
            raise FormatError(f"{fqn}: its rows {name} are no tensor", fqn=fqn)
        stop = start + math.prod(shape_of(match, part))
        low, high = max(start, wanted[0]), min(stop, wanted[1])
        if low < high:
            reads += _reads(match, part, (low - start, high - start), f"{fqn}.{name}")
        start = stop
    if start != math.prod(node.shape):
        raise FormatError(f"{fqn}: its rows have {start} elements, and it has {math.prod(node.shape)}", fqn=fqn)
    return reads


def _plain(match: Context, node: tree.Tensor, wanted: Range) -> Read:
    dtype = match.stored.place(node.fqn).dtype
    if not is_floating(dtype):
        raise ValueError(f"{dtype} is stored, which is no floating dtype")
    row = _rows(match, node, wanted)
    return lambda: _real(row())


def _rows(match: Context, node: tree.Tensor, wanted: Range) -> Read:
    """Read the rows of a stored tensor that contain the range `wanted`."""
    place = match.stored.place(node.fqn)
    shape = place.shape or (1,)
    if wanted[1] > math.prod(shape):
        raise ValueError(f"{node.fqn} has {math.prod(shape)} elements, and it needs {wanted[1]}")
    row = math.prod(shape[1:])
    first, last = wanted[0] // row, -(-wanted[1] // row)
    sizes = (last - first, *shape[1:]) if place.shape else ()
    memory = allocate(node.fqn, sizes, DTYPES[place.dtype], torch.device("cpu"))
    held = None
    if sizes != place.shape:
        if not place.whole:
            raise ValueError("it was a view of another tensor when it was saved")
        part = LocalBox(place.shape, Box((first, *(0 for _ in shape[1:])), sizes), tuple(0 for _ in shape))
        held = LocalShard(place.shape, (part,))
    binding = Binding(node, place, torch.device("cpu"), memory, memory, held=held, scratch=True)
    match.bindings.add(binding, again=node.fqn in match.bindings.by_fqn)
    return lambda: memory.reshape(-1)[wanted[0] - first * row : wanted[1] - first * row]


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored composite tensor, checked."""

    kind: TensorKind
    facts: OuterFacts
    context: Any
    inner: dict[str, tree.Tensor]


def _stored(match: Context, node: tree.Composite) -> _Stored:
    dtype = ALL.get(node.dtype)
    inner = {name: child for name, child in node.inner if isinstance(child, tree.Tensor)}
    if dtype is None or len(inner) != len(node.inner):
        raise ValueError(f"a {node.kind} tensor of {node.dtype} with other tensors inside is stored")
    if dtype.is_complex:
        raise ValueError(f"{node.dtype} is stored, which is no real dtype")
    context = contexts.decode(node.context, match.classes.in_context)
    return _Stored(match.classes.kind(node.kind), OuterFacts(node.shape, dtype), context, inner)


def _composite(match: Context, node: tree.Composite, wanted: Range, fqn: str) -> Read:
    stored = _stored(match, node)
    blocks = BLOCKS.get(node.kind)
    count = math.prod(node.shape)
    if blocks is None:
        rows = {name: _whole(match, child) for name, child in stored.inner.items()}
        return lambda: _numbers(stored, stored.facts, {n: read() for n, read in rows.items()}, stored.context, fqn)[
            wanted[0] : wanted[1]
        ]
    sizes = {name: _size(match, stored, name, count) for name in stored.inner if name in blocks.items}
    unit = math.lcm(*sizes.values())
    around = wanted[0] // unit * unit, min(count, -(-wanted[1] // unit) * unit)
    rows = {name: _inner_rows(match, stored, blocks, name, around, sizes) for name in stored.inner}
    facts = OuterFacts((around[1] - around[0],), stored.facts.dtype)
    context = blocks.context(stored.context, facts.shape)

    def read() -> torch.Tensor:
        numbers = _numbers(stored, facts, {name: one() for name, one in rows.items()}, context, fqn)
        return numbers[wanted[0] - around[0] : wanted[1] - around[0]]

    return read


def _size(match: Context, stored: _Stored, name: str, count: int) -> int:
    """How many elements an item of the inner tensor `name` stands for."""
    shape = match.stored.place(stored.inner[name].fqn).shape
    if len(shape) != 1 or not shape[0] or count % shape[0]:
        raise ValueError(f"{name} has the shape {shape}, which does not fit {count} elements")
    return count // shape[0]


def _inner_rows(match: Context, stored: _Stored, blocks: Blocks, name: str, around: Range, sizes: dict[str, int]) -> Read:
    node = stored.inner[name]
    if name in blocks.elements:
        return _rows(match, node, around)
    if name in blocks.items:
        return _rows(match, node, (around[0] // sizes[name], around[1] // sizes[name]))
    return _whole(match, node)


def _whole(match: Context, node: tree.Tensor) -> Read:
    place = match.stored.place(node.fqn)
    memory = allocate(node.fqn, place.shape, DTYPES[place.dtype], torch.device("cpu"))
    binding = Binding(node, place, torch.device("cpu"), memory, memory, scratch=True)
    match.bindings.add(binding, again=node.fqn in match.bindings.by_fqn)
    return lambda: memory


def _numbers(stored: _Stored, facts: OuterFacts, inner: dict[str, torch.Tensor], context: Any, fqn: str) -> torch.Tensor:
    try:
        made = stored.kind.made(facts, inner, context)
        return _real(stored.kind.plain(made)).reshape(-1)
    except Exception as error:  # of the user's class
        raise FormatError(f"{fqn}: the stored {stored.kind.name} tensor cannot be converted: {error}", fqn=fqn) from error


def _real(numbers: torch.Tensor) -> torch.Tensor:
    """In float32, or in float64 where that loses less."""
    return numbers.double() if numbers.dtype is torch.float64 or not numbers.is_floating_point() else numbers.float()
