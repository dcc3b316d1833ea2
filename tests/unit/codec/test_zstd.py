"""The two ways to compress: what each is for, and that any reader of zstd reads both."""

from __future__ import annotations

import numpy as np
import pytest
import zstandard

from checkpointd.codec.zstd import WINDOW_MAX, general, huffman

EXPONENTS = (np.random.default_rng(3).standard_normal(1 << 20).astype("<f4").view("<u4") >> 23).astype(np.uint8)
"""The exponents of normal numbers, without their sign."""


def entropy(data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> float:
    """The least share of its size to which a code for single bytes can bring `data`."""
    shares = np.bincount(data, minlength=256) / data.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum() / 8)


def test_huffman_comes_near_the_entropy_of_exponents_and_a_search_for_repeats_does_not() -> None:
    exponents = EXPONENTS & 0x7F
    least = entropy(exponents)
    assert len(huffman(exponents)) / exponents.size == pytest.approx(least, rel=0.06)
    assert len(general(exponents)) / exponents.size > 1.1 * least


def test_huffman_still_finds_long_repeats() -> None:
    assert len(huffman(np.zeros(1 << 20, np.uint8))) < 1 << 12


@pytest.mark.parametrize("compress", [general, huffman])
@pytest.mark.parametrize("size", [1, 7, 255, 256, 131_072, 131_073, 1 << 20])
def test_a_frame_declares_its_size_and_a_small_window(compress: object, size: int) -> None:
    assert callable(compress)
    frame = compress(EXPONENTS[:size])
    header = zstandard.get_frame_parameters(frame)
    assert (header.content_size, header.dict_id, header.has_checksum) == (size, 0, False)
    assert header.window_size <= WINDOW_MAX
    assert zstandard.decompress(frame) == EXPONENTS[:size].tobytes()
