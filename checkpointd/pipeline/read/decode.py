"""Stage 5 of a load: check one chunk, decode it, and check the result."""

from __future__ import annotations

import numpy as np

from checkpointd.codec import decode as decode_chunk
from checkpointd.codec import decode_delta
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.errors import CodecError
from checkpointd.layout.indexes import Chunk
from checkpointd.pipeline.shard import Bytes


def decoded(chunk: Chunk, stored: Bytes, out: Bytes | None = None, *, base: Bytes | None = None) -> Bytes:
    """The raw bytes of `chunk`, verified: in `out` if it is given. Raises CodecError if they are damaged.

    A chunk that is stored raw has one digest to check, since its stored bytes are its raw bytes. Its bytes are copied only if
    `out` is other memory than `stored`.
    """
    if chunk.codec == "raw" and chunk.raw == chunk.stored:
        raw = stored
        if out is not None and out is not stored:
            raw = out
            np.copyto(raw, stored)
    else:
        if chunk.checksum is None or xxh3_64(stored) != chunk.checksum:
            raise CodecError(f"the checksum of {chunk.stored} stored bytes does not match")
        raw = np.empty(chunk.raw, dtype=np.uint8) if out is None else out
        if base is None:
            decode_chunk(stored, codec=chunk.codec, raw_size=chunk.raw, out=raw)
        else:
            decode_delta(stored, base, out=raw)
    if xxh3_128(raw) != chunk.digest:
        raise CodecError(f"the digest of {chunk.raw} bytes does not match")
    return raw
