"""The index of a rank as types; its bytes, and its self-checks: references stay inside its attempt, sizes add up, chunks share
no byte.

The bytes of an index begin with its plan: which boxes the rank writes. Whoever compares the plans of all ranks
need not read the chunks, which follow. Both are msgpack (measured against JSON in
`benchmarks/index.py`). Types with millions of instances opt out of garbage collection (`gc=False`). They cannot be part of a
cycle, and the search for cycles would take longer than decoding them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, TypeVar

import msgspec

from checkpointd.errors import FormatError, UsageError
from checkpointd.layout.boxes import Box, PerDimension
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.keys import check_chunks_ref, check_holder
from checkpointd.layout.manifest import LISTING_BYTES_MAX, VERSION, Header, IndexRef, ObjectRef, PlanRef, check_header, digest

CHUNK_BYTES_MAX = (1 << 30) + (1 << 23)
"""The largest chunk, raw or stored: 1 GiB and the bytes that a codec may add."""

LISTED_MAX = 1 << 20
"""The most tensors, aliases, excluded names or objects of an index. A short entry takes ten times its bytes, or more,
of memory; the decoder refuses a longer list before it takes any."""

CHUNKS_MAX = 1 << 22
"""The most chunks of one tensor."""

RAW = "raw"
"""The codec of a chunk whose stored bytes are its raw bytes."""

DELTA = "delta"
"""The codec of a chunk that is stored as its difference from another one."""

_T = TypeVar("_T", bound=msgspec.Struct)

Scope = Literal["rank", "global"]
"""`rank`: a tensor of this rank alone. `global`: a part of a tensor that the ranks hold together."""


class PlanTensor(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One part of one tensor that a rank writes."""

    fqn: str
    dtype: str
    shape: PerDimension
    box: Box
    scope: Scope = "rank"


class Plan(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.plan"):
    """The boxes that one rank writes. Attempts with the same boxes have plans with the same bytes."""

    version: int = VERSION
    rank: int
    world_size: int
    tensors: Annotated[tuple[PlanTensor, ...], msgspec.Meta(max_length=LISTED_MAX)]


class BaseChunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chunk of an older attempt from which a delta was taken. It is never a delta itself, and has as many raw bytes."""

    object: int
    """Position in the index's `objects`, of an object that an older attempt holds."""
    offset: int
    stored: int
    codec: str
    checksum: int | None
    digest: bytes


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A run of whole elements of one box, row-major. Sizes and offsets in bytes."""

    object: int
    """Position in the index's `objects`."""
    offset: int
    stored: int
    raw: int
    codec: str
    checksum: int | None
    """xxh3-64 of the stored bytes; None if the codec is `raw`, since the digest is of the same bytes."""
    digest: bytes
    """xxh3-128 of the raw bytes, 16 bytes, big-endian."""
    base: BaseChunk | None = None
    """Set if the codec is `delta`: the stored bytes are the difference from this chunk."""

    @property
    def end(self) -> int:
        """Where its stored bytes end in the object."""
        return self.offset + self.stored

    @property
    def full(self) -> Chunk:
        """The chunk that is stored in full: the base of a delta, else this chunk."""
        base = self.base
        if base is None:
            return self
        return Chunk(base.object, base.offset, base.stored, self.raw, base.codec, base.checksum, base.digest)

    def as_base(self, number: int) -> BaseChunk:
        """This chunk as the base of a delta, in the index's object `number`."""
        return BaseChunk(number, self.offset, self.stored, self.codec, self.checksum, self.digest)


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The chunks that hold one box of one tensor, in row-major order."""

    fqn: str
    dtype: str
    shape: PerDimension
    box: Box
    scope: Scope
    chunks: Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=CHUNKS_MAX)]

    @property
    def part(self) -> PlanTensor:
        return PlanTensor(self.fqn, self.dtype, self.shape, self.box, self.scope)


class Alias(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that shares the memory of `owner`: element strides and offset into the owner's contiguous elements."""

    fqn: str
    owner: str
    shape: PerDimension
    stride: PerDimension
    offset: int


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one rank stored in one attempt."""

    tag: str
    attempt: str
    rank: int
    world_size: int
    step: int
    objects: Annotated[tuple[ObjectRef, ...], msgspec.Meta(max_length=LISTED_MAX)]
    """The objects of this attempt, and objects of older attempts that hold unchanged chunks."""
    tensors: Annotated[tuple[TensorEntry, ...], msgspec.Meta(max_length=LISTED_MAX)]
    aliases: Annotated[tuple[Alias, ...], msgspec.Meta(max_length=LISTED_MAX)]
    excluded: Annotated[tuple[str, ...], msgspec.Meta(max_length=LISTED_MAX)]
    """FQNs of frozen parameters that were left out on purpose."""
    since_full: int = 0
    """How many checkpoints in a row, up to this one, have deltas on this rank; 0: this one has none."""
    tree: bytes
    """The state tree (`tree.py`), msgpack."""

    @property
    def prefix(self) -> str:
        return f"{self.tag}/{self.attempt}"


class IndexContent(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.index"):
    """What follows the plan in the bytes of an index, with the chunks of each box in the plan's order. Else as `Index`."""

    version: int = VERSION
    tag: str
    attempt: str
    rank: int
    world_size: int
    step: int
    objects: Annotated[tuple[ObjectRef, ...], msgspec.Meta(max_length=LISTED_MAX)]
    chunks: Annotated[
        tuple[Annotated[tuple[Chunk, ...], msgspec.Meta(max_length=CHUNKS_MAX)], ...], msgspec.Meta(max_length=LISTED_MAX)
    ]
    aliases: Annotated[tuple[Alias, ...], msgspec.Meta(max_length=LISTED_MAX)]
    excluded: Annotated[tuple[str, ...], msgspec.Meta(max_length=LISTED_MAX)]
    since_full: int = 0
    tree: bytes


def encode_index(index: Index, name: str) -> tuple[IndexRef, bytes]:
    """The bytes of `index`, and the reference by which a vote names them. Raises UsageError if a reader would refuse them."""
    for some in ("objects", "tensors", "aliases", "excluded"):
        count = len(getattr(index, some))
        if count > LISTED_MAX:
            raise UsageError(f"the index of {index.tag} lists {count} {some}, more than {LISTED_MAX}: use fewer tensors")
    parts = tuple(entry.part for entry in index.tensors)
    plan, listed = encode_plan(Plan(rank=index.rank, world_size=index.world_size, tensors=parts))
    stored = msgspec.msgpack.encode(
        IndexContent(
            tag=index.tag,
            attempt=index.attempt,
            rank=index.rank,
            world_size=index.world_size,
            step=index.step,
            objects=index.objects,
            chunks=tuple(entry.chunks for entry in index.tensors),
            aliases=index.aliases,
            excluded=index.excluded,
            since_full=index.since_full,
            tree=index.tree,
        )
    )
    data = listed + stored
    if len(data) > LISTING_BYTES_MAX:
        raise UsageError(
            f"the index of {index.tag} has {len(data)} bytes, more than {LISTING_BYTES_MAX}: use larger chunks or fewer tensors"
        )
    return IndexRef(name=name, size=len(data), digest=digest(data), plan=plan), data


def decode_index(data: bytes, plan: PlanRef, key: str) -> Index:
    """The index in `data`, which begins with `plan`. Raises FormatError if a reference leaves its attempt or the
    sizes do not add up.
    """
    boxes = decode_plan(memoryview(data)[: plan.size], key)
    stored = _decoded(memoryview(data)[plan.size :], IndexContent, key)
    if (stored.rank, stored.world_size, len(stored.chunks)) != (boxes.rank, boxes.world_size, len(boxes.tensors)):
        raise FormatError(f"{key} is damaged: its plan is another one's", key=key)
    index = Index(
        tag=stored.tag,
        attempt=stored.attempt,
        rank=stored.rank,
        world_size=stored.world_size,
        step=stored.step,
        objects=stored.objects,
        tensors=tuple(
            TensorEntry(part.fqn, part.dtype, part.shape, part.box, part.scope, chunks)
            for part, chunks in zip(boxes.tensors, stored.chunks, strict=True)
        ),
        aliases=stored.aliases,
        excluded=stored.excluded,
        since_full=stored.since_full,
        tree=stored.tree,
    )
    _check_index(index, key)
    return index


def encode_plan(plan: Plan) -> tuple[PlanRef, bytes]:
    """The bytes of `plan`, as an index begins with them."""
    data = msgspec.msgpack.encode(plan)
    return PlanRef(size=len(data), digest=digest(data)), data


def decode_plan(data: bytes | bytearray | memoryview, key: str) -> Plan:
    """The plan in `data`. Raises FormatError, which names `key` and the fault."""
    return _decoded(data, Plan, key)


def _decoded(data: bytes | bytearray | memoryview, kind: type[_T], key: str) -> _T:
    try:
        check_header(msgspec.msgpack.decode(data, type=Header), kind, key)
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{key} is damaged, or too large to read: {error}", key=key) from error


def _check_index(index: Index, key: str) -> None:
    for ref in index.objects:
        _check_object(ref, index, key)
    seen: set[str] = set()
    parts: set[tuple[str, Box]] = set()
    for entry in index.tensors:
        if (entry.fqn, entry.box) in parts:
            raise FormatError(f"{key} lists {entry.fqn} twice", key=key, fqn=entry.fqn)
        parts.add((entry.fqn, entry.box))
        seen.add(entry.fqn)
        _check_entry(entry, index, key)
    _check_apart(index, key)
    for alias in index.aliases:
        if alias.owner not in seen or alias.fqn in seen:
            raise FormatError(f"{key}: {alias.fqn} shares memory with {alias.owner}, which is not stored", key=key)


def _check_object(ref: ObjectRef, index: Index, key: str) -> None:
    check_chunks_ref(ref.name, index.rank)
    if ref.held_by and check_holder(ref.held_by) == index.prefix:
        raise FormatError(f"{key} names {ref.name} as an older attempt's, but {ref.held_by} is its own", key=key)


def _check_entry(entry: TensorEntry, index: Index, key: str) -> None:
    if entry.dtype not in ITEM_BYTES:
        raise FormatError(f"{key}: {entry.fqn} has the unknown dtype {entry.dtype!r}; a newer release may know it", key=key)
    entry.box.check(entry.shape)
    item = ITEM_BYTES[entry.dtype]
    stored, needed = sum(chunk.raw for chunk in entry.chunks), entry.box.numel() * item
    if stored != needed:
        raise FormatError(f"{key}: {entry.fqn} needs {needed} bytes, and its chunks hold {stored}", key=key, fqn=entry.fqn)
    for chunk in entry.chunks:
        fault = _chunk_fault(chunk, index, item)
        if fault:
            raise FormatError(f"{key}: a chunk of {entry.fqn} {fault}", key=key, fqn=entry.fqn)


def _chunk_fault(chunk: Chunk, index: Index, item: int) -> str | None:
    if not 0 <= chunk.object < len(index.objects) or chunk.offset < 0:
        return "lies outside the objects of its attempt"
    if chunk.raw < 1 or chunk.stored < 1 or max(chunk.raw, chunk.stored) > CHUNK_BYTES_MAX:
        return f"declares {chunk.raw} bytes, stored as {chunk.stored}"
    if chunk.end > index.objects[chunk.object].size:
        return "lies outside the objects of its attempt"
    if chunk.raw % item:
        return f"holds {chunk.raw} bytes, which is not a whole number of elements of {item} bytes"
    if len(chunk.digest) != 16:
        return f"has a digest of {len(chunk.digest)} bytes"
    if (chunk.codec == RAW) != (chunk.checksum is None):
        return "is stored raw and has a checksum, or is encoded and has none"
    if chunk.codec == RAW and chunk.raw != chunk.stored:
        return f"is stored raw, and holds {chunk.raw} bytes in {chunk.stored}"
    if (chunk.codec == DELTA) != (chunk.base is not None):
        return "is a delta without a base, or has a base and is no delta"
    if chunk.base is None:
        return None
    if chunk.base.codec == DELTA:
        return "is a delta of a delta"
    fault = _chunk_fault(chunk.full, index, item)
    if fault is None and not index.objects[chunk.base.object].held_by:
        fault = "lies in an object of the same attempt"
    return None if fault is None else f"has a base that {fault}"


def _check_apart(index: Index, key: str) -> None:
    """Check that two chunks lie either at the same bytes or at disjoint ones."""
    chunks = [chunk for entry in index.tensors for chunk in entry.chunks]
    chunks += [chunk.full for chunk in chunks if chunk.base is not None]
    placed = sorted((c.object, c.offset, c.end) for c in chunks)
    for one, two in pairwise(placed):
        if one[0] == two[0] and two[1] < one[2] and one != two:
            name = index.objects[one[0]].name
            raise FormatError(f"{key}: chunks overlap at byte {two[1]} of {name}", key=key)
