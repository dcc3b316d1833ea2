"""Stage 4 of a save: a chunk is encoded where that makes it smaller, and its sums are those of its bytes."""

from __future__ import annotations

import numpy as np
import pytest

from checkpointd.codec import ElementType, decode
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.pipeline.write.encode import Encoded


@pytest.mark.parametrize("codec", ["raw", "zstd", "planes"])
@pytest.mark.parametrize("data", [bytes(4000), np.random.default_rng(1).bytes(4000)], ids=["zeros", "noise"])
def test_a_chunk_is_encoded_only_where_that_makes_it_smaller(codec: str, data: bytes) -> None:
    raw = np.frombuffer(data, dtype=np.uint8)
    encoded = Encoded.of(raw, codec, ElementType(4, "float"))  # type: ignore[arg-type]  # one of the three
    shrinks = codec != "raw" and not raw.any()
    assert encoded.codec == (codec if shrinks else "raw")
    assert (len(encoded.stored) < raw.nbytes) == shrinks
    assert (encoded.checksum, encoded.digest) == (xxh3_64(encoded.stored) if shrinks else None, xxh3_128(raw))
    out = np.empty_like(raw)
    decode(encoded.stored, codec=encoded.codec, raw_size=raw.nbytes, out=out)
    assert out.tobytes() == data
