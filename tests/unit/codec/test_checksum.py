"""xxh3 by its published vectors, over every kind of buffer."""

from __future__ import annotations

import numpy as np
import pytest

from checkpointd.codec.checksum import xxh3_64, xxh3_128, xxh3_128_hex


def test_digests_of_nothing_are_the_published_ones() -> None:
    assert xxh3_64(b"") == 0x2D06800538D394C2
    assert xxh3_128_hex(b"") == "99aa06d3014798d86001c324468d497f"


def test_binary_and_text_are_one_digest_big_endian() -> None:
    assert xxh3_128(b"checkpoint").hex() == xxh3_128_hex(b"checkpoint")
    # Of input longer than 240 bytes, the 64-bit digest is the low half of the 128-bit one; canonically it comes last.
    assert xxh3_128(bytes(1000))[8:] == xxh3_64(bytes(1000)).to_bytes(8, "big")


def test_every_buffer_of_the_same_bytes_has_the_same_digest() -> None:
    values = np.arange(12, dtype="<f4").reshape(3, 4)
    raw = values.tobytes()
    for buffer in (values, memoryview(raw), values.data, bytearray(raw)):
        assert xxh3_64(buffer) == xxh3_64(raw)
        assert xxh3_128(buffer) == xxh3_128(raw)


def test_a_buffer_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="one C-contiguous run"):
        xxh3_64(np.zeros((4, 4))[:, ::2])
