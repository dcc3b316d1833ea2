"""The bytes of an index, and its self-checks: references stay inside its attempt, sizes add up, chunks share no byte."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from checkpointd.errors import FormatError
from checkpointd.layout.boxes import Box
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.keys import check_chunks_ref, check_holder
from checkpointd.layout.manifest import CHUNK_BYTES_MAX, DELTA, Chunk, Header, Index, ObjectRef, TensorEntry, check_header


def encode_index(index: Index) -> bytes:
    return msgspec.msgpack.encode(index)


def decode_index(data: bytes, key: str) -> Index:
    """The index in `data`. Raises FormatError if a reference leaves its attempt or the sizes do not add up."""
    try:
        header = msgspec.msgpack.decode(data, type=Header)
        check_header(header, Index, key)
        index = msgspec.msgpack.decode(data, type=Index)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"{key} is damaged: {error}", key=key) from error
    _check_index(index, key)
    return index


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
    if chunk.offset + chunk.stored > index.objects[chunk.object].size:
        return "lies outside the objects of its attempt"
    if chunk.raw % item:
        return f"holds {chunk.raw} bytes, which is not a whole number of elements of {item} bytes"
    if len(chunk.digest) != 16:
        return f"has a digest of {len(chunk.digest)} bytes"
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
    placed = sorted((c.object, c.offset, c.offset + c.stored) for c in chunks)
    for one, two in pairwise(placed):
        if one[0] == two[0] and two[1] < one[2] and one != two:
            name = index.objects[one[0]].name
            raise FormatError(f"{key}: chunks overlap at byte {two[1]} of {name}", key=key)
