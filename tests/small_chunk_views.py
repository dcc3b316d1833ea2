"""Checkpoint views in memory with chunks as small as one element. No writer makes such chunks, but readers must accept them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpointd.codec import encode
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.layout.boxes import Box, whole
from checkpointd.layout.indexes import Chunk, Index, TensorEntry
from checkpointd.layout.keys import AttemptId, chunks_name
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.layout.manifest import BallotRef, ObjectRef, WriterIdentity
from checkpointd.layout.regions import slices
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.store.memory import MemoryStore

ATTEMPT = AttemptId(1, 0)
Tensors = Mapping[str, tuple[NDArray[Any], str, Sequence[Box]]]
"""FQN -> its elements, carried as a reader hands them out, torch's name of its dtype, and the boxes that it is stored in."""


async def small_chunk_view(
    store: MemoryStore, tensors: Tensors, *, ranks: int, chunk_bytes: int, codec: str = "raw"
) -> CheckpointView:
    """Store `tensors`, the ranks taking turns with the boxes, in chunks of at most `chunk_bytes` (one element at least)."""
    checkpoint = LoggedAttempt.of(_commit(ranks))
    indexes = {}
    for rank in range(ranks):
        name, data = chunks_name(rank, 0), bytearray()
        entries = [
            _entry(data, fqn, tensor, dtype, box, chunk_bytes, codec)
            for fqn, (tensor, dtype, boxes) in tensors.items()
            for number, box in enumerate(boxes)
            if number % ranks == rank
        ]
        await store.put(f"{checkpoint.prefix}/{name}", bytes(data))
        indexes[rank] = _index(rank, ranks, ObjectRef(name=name, size=len(data)), tuple(entries))
    return CheckpointView(checkpoint, indexes)


def _entry(data: bytearray, fqn: str, tensor: NDArray[Any], dtype: str, box: Box, chunk_bytes: int, codec: str) -> TensorEntry:
    item = tensor.itemsize
    raw = np.ascontiguousarray(tensor[slices(whole(tensor.shape), box)]).tobytes()
    step = max(item, chunk_bytes // item * item)
    chunks = []
    for start in range(0, len(raw), step):
        part = raw[start : start + step]
        stored = bytes(encode(part, codec=codec, itemsize=1, kind="other"))
        chunks.append(
            Chunk(0, len(data), len(stored), len(part), codec, None if codec == "raw" else xxh3_64(stored), xxh3_128(part))
        )
        data += stored
    return TensorEntry(fqn, dtype, tensor.shape, box, "global", tuple(chunks))


def _index(rank: int, ranks: int, ref: ObjectRef, entries: tuple[TensorEntry, ...]) -> Index:
    return Index(
        tag="tag",
        attempt=str(ATTEMPT),
        rank=rank,
        world_size=ranks,
        step=1,
        objects=(ref,),
        tensors=entries,
        aliases=(),
        excluded=(),
        tree=b"\xc0",
    )


def _commit(ranks: int) -> CommitRecord:
    return CommitRecord(
        attempt=f"tag/{ATTEMPT}",
        n=0,
        step=1,
        world_size=ranks,
        ballot=BallotRef(digest="0" * 32, size=1),
        decided_by=0,
        writer=WriterIdentity(host="here", pid=1, time=""),
    )
