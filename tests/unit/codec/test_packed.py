"""Packed objects: what is packed is unpacked, and nothing else is taken."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import zstd
from checkpointd.codec.packed import pack, unpack
from checkpointd.errors import CodecError

MIB = 1 << 20


@given(st.binary(min_size=1, max_size=5000))
def test_what_is_packed_is_unpacked(content: bytes) -> None:
    assert bytes(unpack(pack(content), len(content))) == content


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "too few"),
        (b"ckptpack", "too few"),
        (b"x" + pack(b"content")[1:], "no packed object begins here"),
        (b"ckptpack" + bytes(8) + pack(b"content")[16:], "declares 0 bytes"),
        (struct.pack("<8sQ", b"ckptpack", 6) + pack(b"content")[16:], "declares 7 bytes, not 6"),
        (struct.pack("<8sQ", b"ckptpack", 7) + b"content", "no zstd frame begins here"),
        (pack(b"content")[:-1], "damaged"),
        (pack(b"content") + b"more", "damaged"),
    ],
)
def test_anything_else_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        unpack(data, MIB)


def bomb(declared: int, size: int) -> bytes:
    """A packed object that declares `declared` bytes, around a frame of `size` zeros."""
    return struct.pack("<8sQ", b"ckptpack", declared) + zstd.general(np.zeros(size, np.uint8))


@pytest.mark.parametrize("declared", [64 * MIB, 2**64 - 1, 10])
def test_a_bomb_is_refused_and_takes_no_memory(declared: int) -> None:
    data = bomb(declared, 64 * MIB)
    assert len(data) < 16384
    tracemalloc.start()
    with pytest.raises(CodecError, match="declares"):
        unpack(data, MIB)
    assert tracemalloc.get_traced_memory()[1] < MIB
    tracemalloc.stop()


def test_a_frame_without_its_size_is_refused() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(b"content")
    with pytest.raises(CodecError, match="declares"):
        unpack(struct.pack("<8sQ", b"ckptpack", 7) + frame, MIB)


def test_a_small_object_that_declares_as_much_as_a_reader_would_allow_is_refused() -> None:
    """An object of a few KiB that is an honest frame: one reader of many ranks would take that much for each."""
    data = bomb(64 * MIB, 64 * MIB)
    with pytest.raises(CodecError, match="at most"):
        unpack(data, 256 * MIB)


@pytest.mark.parametrize("size", [MIB + 1, 2 * MIB])
def test_what_would_become_too_small_to_be_believed_is_packed_all_the_same(size: int) -> None:
    """Such as many tensors whose names are long and alike."""
    content = b"x" * size
    assert bytes(unpack(pack(content), size)) == content
