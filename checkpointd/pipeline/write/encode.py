"""Stage 5 of a save: encode one chunk, and give it the digest of its raw bytes. If it is encoded, it also gets the checksum of
its stored bytes.

A chunk may be stored as its difference from the base, the chunk that was stored in full at its place (`full_every`).

Invariants
  DELTA-1  A base is stored in full, so a load reads at most one chunk besides a delta. It belongs to a shard whose commit was
      seen and is durable (DEDUP-2), and lies at the same place of a tensor of the same dtype.
  DELTA-2  The bytes of a base are read from the store and verified before the difference is taken. If that fails, the chunk is
      stored in full.
  DELTA-3  The object of a base is among the objects of the index, like those of references. So the check before the vote
      (DEDUP-3), votes, commits and collections treat it alike.
  DELTA-4  After `full_every - 1` checkpoints with deltas comes one without, not even by reference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np

from checkpointd.codec import Codec, ElementType, difference, planes_ratio
from checkpointd.codec import encode as encode_chunk
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.errors import CheckpointdError
from checkpointd.layout.indexes import DELTA, Chunk
from checkpointd.pipeline.read.decode import decoded
from checkpointd.pipeline.shard import Bytes
from checkpointd.pipeline.write.dedup import Held
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.split import Span

log = logging.getLogger("checkpointd")

DELTA_GAIN_MIN = 0.1
"""A delta must save at least this part of the chunk's size in full: a load reads and decodes two chunks for it."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk after its codec; `seconds` is the time of encoding on its thread."""

    codec: str
    stored: memoryview
    raw: int
    checksum: int | None
    digest: bytes
    seconds: float

    @staticmethod
    def of(data: Bytes, codec: Codec, element: ElementType, digest: bytes | None = None, base: Bytes | None = None) -> Encoded:
        """Encode `data`, whose digest may be known: as a delta of `base` if that is given and estimates call it smaller than by
        `codec`. It is stored raw if neither shrinks it.
        """
        began = time.perf_counter()
        delta = None if base is None else _delta(data, base, codec, element)
        if delta is None and codec == "raw":
            return Encoded.raw_of(data, digest)
        name: str = codec if delta is None else DELTA
        stored = encode_chunk(data, codec=codec, itemsize=element.itemsize, kind=element.kind) if delta is None else delta
        if len(stored) >= data.nbytes:
            return Encoded.raw_of(data, digest, time.perf_counter() - began)
        seconds = time.perf_counter() - began
        return Encoded(name, stored, data.nbytes, xxh3_64(stored), digest or xxh3_128(data), seconds)

    @staticmethod
    def raw_of(data: Bytes, digest: bytes | None = None, seconds: float = 0.0) -> Encoded:
        """`data` stored raw: it has a digest alone."""
        return Encoded("raw", data.data, data.nbytes, None, digest or xxh3_128(data), seconds)

    def at(self, number: int, offset: int) -> Chunk:
        """The index entry of this chunk at byte `offset` of the index's object `number`."""
        return Chunk(number, offset, len(self.stored), self.raw, self.codec, self.checksum, self.digest)


def _delta(data: Bytes, base: Bytes, codec: Codec, element: ElementType) -> memoryview | None:
    """The stored bytes of `data` as a delta of `base`; None if a sample says that this is not worth it."""
    made, words = difference(data, base, itemsize=element.itemsize), ElementType(element.itemsize, "other")
    full = 1.0 if codec == "raw" else planes_ratio(data, element)
    if planes_ratio(made, words) > (1 - DELTA_GAIN_MIN) * full:
        return None
    return encode_chunk(made, codec="planes", itemsize=words.itemsize, kind=words.kind)


async def read_base(job: PersistJob, span: Span, held: Held) -> Bytes | None:
    """The verified raw bytes of the chunk `held`, of which `span` may become a delta; None if they cannot be had (DELTA-2)."""
    ref, chunk = held
    stored = np.empty(chunk.stored, dtype=np.uint8)
    try:
        await job.store.get_range(ref.key(""), chunk.offset, stored.data)
        return await asyncio.get_running_loop().run_in_executor(None, decoded, chunk, stored)
    except CheckpointdError as error:
        log.warning("%s: rank %d stores a chunk of %s in full, since the one before it in %s cannot be used: %s",
                    job.info.prefix, job.info.rank, span.tensor.fqn, ref.key(""), error)  # fmt: skip
        return None
