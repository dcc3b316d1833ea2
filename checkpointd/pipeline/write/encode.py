"""Stage 4 of a save: encode one chunk, and give it the checksum of its stored bytes and the digest of its raw bytes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from checkpointd.codec import Codec, ElementType
from checkpointd.codec import encode as encode_chunk
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.layout.manifest import Chunk
from checkpointd.pipeline.shard import Bytes


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk after its codec; `seconds` is the time of encoding on its thread."""

    codec: Codec
    stored: memoryview
    raw: int
    checksum: int
    digest: bytes
    seconds: float

    @staticmethod
    def of(data: Bytes, codec: Codec, element: ElementType, digest: bytes | None = None) -> Encoded:
        """Encode `data`, whose digest may be known. It is stored raw if the codec does not shrink it."""
        if codec == "raw":
            return Encoded.raw_of(data, digest)
        began = time.perf_counter()
        stored = encode_chunk(data, codec=codec, itemsize=element.itemsize, kind=element.kind)
        if len(stored) >= data.nbytes:
            codec, stored = "raw", data.data
        seconds = time.perf_counter() - began
        return Encoded(codec, stored, data.nbytes, xxh3_64(stored), digest or xxh3_128(data), seconds)

    @staticmethod
    def raw_of(data: Bytes, digest: bytes | None = None) -> Encoded:
        """`data` stored raw, with its checksum and digest."""
        return Encoded("raw", data.data, data.nbytes, xxh3_64(data), digest or xxh3_128(data), 0.0)

    def at(self, number: int, offset: int) -> Chunk:
        """The index entry of this chunk at byte `offset` of the index's object `number`."""
        return Chunk(number, offset, len(self.stored), self.raw, self.codec, self.checksum, self.digest)
