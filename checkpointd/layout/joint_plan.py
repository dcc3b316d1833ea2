"""The joint plan: which rank stored which box of each global tensor, and which ranks are twins, for ranks that load only what
they need.

The coordinator writes it with a commit of several ranks, from the plans that it has compared anyway. A rank that loads reads
it, and then only the indexes of the ranks that stored a box it wants. docs/FORMAT.md describes its bytes.

Boxes of one tensor mostly form a regular grid, so every column is stored as differences, which zstd makes very small. A block
is decoded only when one of its tensors is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
import numpy as np
import zstandard

from checkpointd.errors import FormatError
from checkpointd.layout.boxes import Box, PerDimension
from checkpointd.layout.indexes import LISTED_MAX
from checkpointd.layout.keys import WORLD_SIZE_MAX
from checkpointd.layout.manifest import LISTING_BYTES_MAX, VERSION, Header, JointPlanRef, StoredContent, check_header, digest
from checkpointd.layout.plan import NumberedPlan, Numbers, TensorNumbers, rows_by_tensor

BLOCK_BYTES = 1 << 20
"""A block ends with the tensor that makes its columns at least this long."""
BLOCK_BYTES_MAX = 1 << 28
"""The most bytes of one block's columns."""
_LEVEL = 9
_NUMBER = np.dtype("<i8")


class JointTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A global tensor, and how many boxes of it the ranks list."""

    fqn: str
    dtype: str
    shape: PerDimension
    boxes: int


_JointTensors = Annotated[list[JointTensor], msgspec.Meta(max_length=LISTED_MAX)]


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The boxes of the next `tensors` tensors, compressed, and the bytes that they have decoded."""

    tensors: int
    nbytes: int
    data: bytes


def twins_of(contents: Iterable[StoredContent | None]) -> tuple[list[int], list[str]]:
    """For each rank the first rank that is its twin, and the FQNs of own values that differ between ranks.

    Twins have one frame, and own values of the same names. A rank whose content is unknown is nobody's twin.
    """
    firsts: dict[tuple[str, frozenset[str]], int] = {}
    values: dict[str, set[str]] = {}
    twins = []
    for rank, content in enumerate(contents):
        if content is None:
            twins.append(rank)
            continue
        twins.append(firsts.setdefault((content.frame, frozenset(content.own_values)), rank))
        for fqn, value in content.own_values.items():
            values.setdefault(fqn, set()).add(value)
    return twins, sorted(fqn for fqn, found in values.items() if len(found) > 1)


class StoredJointPlan(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.joint-plan"):
    """The joint plan as it is stored."""

    version: int = VERSION
    world_size: int
    names: bytes
    """The msgpack array of all JointTensors, sorted by FQN, compressed."""
    names_nbytes: int
    blocks: tuple[Block, ...]
    twins: bytes = b""
    """For each rank the first rank that is its twin, as a column, compressed."""
    differing: tuple[str, ...] = ()
    """The FQNs of own values that are not the same on all ranks that have them, sorted."""

    def encode(self, contents: Iterable[StoredContent | None]) -> bytes:
        """The bytes of the joint plan of ranks that stored these `contents` beside their boxes."""
        twins, differing = twins_of(contents)
        column = np.diff(np.array(twins, np.int64), prepend=0).astype(_NUMBER).tobytes()
        packed = zstandard.ZstdCompressor(level=_LEVEL).compress(column)
        return msgspec.msgpack.encode(msgspec.structs.replace(self, twins=packed, differing=tuple(differing)))


def joint_plan(listings: Mapping[int, NumberedPlan], names: TensorNumbers) -> StoredJointPlan:
    """The joint plan of all ranks, whose plans were compared, without twins. The same plans give the same one."""
    rows = rows_by_tensor(listings, names)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    tensors: list[JointTensor] = []
    blocks: list[Block] = []
    columns: list[bytes] = []
    first = 0
    for number in sorted(rows, key=lambda number: names.by_number[number]):
        fqn, dtype, shape = names.by_number[number]
        ranks, places = rows[number]
        table = np.column_stack([ranks, places]).T
        columns.append(np.diff(table, prepend=0, axis=1).astype(_NUMBER).tobytes())
        tensors.append(JointTensor(fqn, dtype, shape, len(ranks)))
        if sum(map(len, columns)) >= BLOCK_BYTES:
            blocks.append(_block(len(tensors) - first, columns, packer))
            columns, first = [], len(tensors)
    if columns:
        blocks.append(_block(len(tensors) - first, columns, packer))
    listed = msgspec.msgpack.encode(tensors)
    return StoredJointPlan(
        world_size=len(listings), names=packer.compress(listed), names_nbytes=len(listed), blocks=tuple(blocks)
    )


def joint_plan_ref(data: bytes) -> JointPlanRef:
    """The reference by which an outcome names the joint plan `data`."""
    return JointPlanRef(digest=digest(data), size=len(data))


def _block(tensors: int, columns: Iterable[bytes], packer: zstandard.ZstdCompressor) -> Block:
    data = b"".join(columns)
    return Block(tensors, len(data), packer.compress(data))


@dataclass(slots=True)
class JointPlan:
    """A joint plan that was read. Its methods raise FormatError if a block is damaged."""

    key: str
    world_size: int
    tensors: Mapping[str, JointTensor]
    """All global tensors by FQN."""
    _blocks: tuple[Block, ...]
    _at: Mapping[str, tuple[int, int]]
    """The block of each tensor, and the first of its numbers there."""
    twins: Sequence[int] = ()
    """For each rank the first rank that is its twin (`twins_of`)."""
    differing: frozenset[str] = frozenset()
    """The FQNs of own values that are not the same on all ranks that have them."""
    _decoded: dict[int, Numbers] = field(default_factory=dict)

    def ranks_of(self, fqn: str, box: Box) -> tuple[int, ...]:
        """The ranks that stored an element of `box` of the tensor `fqn`. Of equal boxes, only the first rank counts."""
        tensor = self.tensors[fqn]
        box.check(tensor.shape)
        ndim = len(tensor.shape)
        table = self._table(tensor)
        ranks, places = table[0], table[1:].T
        if not ndim:
            return tuple(ranks[:1].tolist())
        offsets, sizes = places[:, :ndim], places[:, ndim:]
        begin = np.maximum(offsets, np.array(box.offsets, np.int64))
        end = np.minimum(offsets + sizes, np.array(box.offsets, np.int64) + np.array(box.sizes, np.int64))
        touching = np.flatnonzero((begin < end).all(axis=1))
        first: dict[bytes, int] = {}
        for row, rank in zip(places[touching], ranks[touching].tolist(), strict=True):
            first.setdefault(row.tobytes(), rank)
        return tuple(sorted(set(first.values())))

    def _table(self, tensor: JointTensor) -> Numbers:
        """The columns of `tensor`: its ranks, its offsets in each dimension, its sizes in each dimension."""
        number, start = self._at[tensor.fqn]
        width = 1 + 2 * len(tensor.shape)
        flat = self._block(number)[start : start + width * tensor.boxes]
        table = np.cumsum(flat.reshape(width, tensor.boxes), axis=1)
        if not ((table[0] >= 0) & (table[0] < self.world_size)).all():
            raise FormatError(f"{self.key} gives {tensor.fqn} to ranks that there are not", key=self.key, fqn=tensor.fqn)
        return table

    def _block(self, number: int) -> Numbers:
        if number not in self._decoded:
            block = self._blocks[number]
            if self._decoded and sum(map(len, self._decoded.values())) * _NUMBER.itemsize + block.nbytes > BLOCK_BYTES_MAX:
                self._decoded.clear()  # many small blocks may declare that much each
            self._decoded[number] = np.frombuffer(_unpacked(block.data, block.nbytes, self.key), _NUMBER)
        return self._decoded[number]


def decode_joint_plan(data: bytes, key: str) -> JointPlan:
    """The joint plan in `data`. Raises FormatError if its parts do not fit together, or are too large."""
    try:
        check_header(msgspec.msgpack.decode(data, type=Header), StoredJointPlan, key)
        stored = msgspec.msgpack.decode(data, type=StoredJointPlan)
        if not 0 < stored.world_size <= WORLD_SIZE_MAX or not 0 <= stored.names_nbytes <= LISTING_BYTES_MAX:
            raise FormatError(f"{key} declares {stored.world_size} ranks and {stored.names_nbytes} bytes of names", key=key)
        listed = _unpacked(stored.names, stored.names_nbytes, key)
        tensors = msgspec.msgpack.decode(listed, type=_JointTensors)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{key} is damaged: {error}", key=key) from error
    by_fqn = {tensor.fqn: tensor for tensor in tensors}
    if len(by_fqn) != len(tensors):
        raise FormatError(f"{key} lists a tensor twice", key=key)
    places, twins = _places(tensors, stored.blocks, key), _twins(stored, key)
    return JointPlan(key, stored.world_size, by_fqn, stored.blocks, places, twins, frozenset(stored.differing))


def _twins(stored: StoredJointPlan, key: str) -> list[int]:
    column = np.frombuffer(_unpacked(stored.twins, stored.world_size * _NUMBER.itemsize, key), _NUMBER)
    twins = np.cumsum(column)
    inside = (twins >= 0) & (twins <= np.arange(stored.world_size))
    if not inside.all() or not (twins[twins] == twins).all():
        raise FormatError(f"{key} calls ranks twins of later ranks, or of ranks with another twin", key=key)
    return [int(twin) for twin in twins]


def _places(tensors: list[JointTensor], blocks: tuple[Block, ...], key: str) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    at = 0
    for number, block in enumerate(blocks):
        if block.tensors < 1 or not 0 < block.nbytes <= BLOCK_BYTES_MAX:
            raise FormatError(f"{key} declares a block of {block.tensors} tensors and {block.nbytes} bytes", key=key)
        start = 0
        for tensor in tensors[at : at + block.tensors]:
            if tensor.boxes < 1:
                raise FormatError(f"{key} declares {tensor.boxes} boxes of {tensor.fqn}", key=key, fqn=tensor.fqn)
            found[tensor.fqn] = (number, start)
            start += (1 + 2 * len(tensor.shape)) * tensor.boxes
        if start * _NUMBER.itemsize != block.nbytes:
            raise FormatError(f"{key}: block {number} has {block.nbytes} bytes for {start} numbers", key=key)
        at += block.tensors
    if at != len(tensors):
        raise FormatError(f"{key} has blocks for {at} of {len(tensors)} tensors", key=key)
    return found


def _unpacked(data: bytes, nbytes: int, key: str) -> bytes:
    """The decoded bytes. There must be `nbytes` of them, which is checked before any memory is taken."""
    try:
        declared = zstandard.frame_content_size(data)
        found = zstandard.ZstdDecompressor().decompress(data) if declared == nbytes else b""
    except zstandard.ZstdError as error:
        raise FormatError(f"{key} is damaged: {error}", key=key) from error
    if len(found) != nbytes:
        raise FormatError(f"{key} is damaged: a part of it does not have the {nbytes} bytes that it declares", key=key)
    return found
