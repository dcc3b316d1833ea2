"""Stored bytes that are not to be trusted: CodecError and nothing else, in bounded memory, and `out` left as it was."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import decode, encode
from checkpointd.codec.zstd import WINDOW_MAX
from checkpointd.errors import CodecError

GUARD = 64


def refused(stored: bytes, codec: str, raw_size: int) -> str:
    """The message of the CodecError; `out` and what lies around it must be untouched."""
    memory = np.full(GUARD + raw_size + GUARD, 0xEE, dtype=np.uint8)
    with pytest.raises(CodecError) as caught:
        decode(stored, codec=codec, raw_size=raw_size, out=memory[GUARD:-GUARD])
    assert (memory == 0xEE).all()
    return str(caught.value)


def frame(raw: bytes, codec: str = "planes", itemsize: int = 4) -> bytes:
    return bytes(encode(raw, codec=codec, itemsize=itemsize, kind="float"))


def planes_frame(*planes: tuple[int, bytes], raw_size: int, head: bytes = b"\x01\x01\x01\x00", tail: bytes = b"") -> bytes:
    table = b"".join(struct.pack("<BQ", method, len(body)) for method, body in planes)
    return head + struct.pack("<Q", raw_size) + table + b"".join(body for _, body in planes) + tail


RAW = (np.random.default_rng(5).standard_normal(500) * 0.02).astype("<f4").tobytes() + b"\x01\x02"
SAMPLES = {
    "raw": RAW,
    "zstd": frame(RAW[:800] * 3, "zstd"),
    "planes": frame(RAW),
}
RAW_SIZES = {"raw": len(RAW), "zstd": 2400, "planes": len(RAW)}
each_codec = pytest.mark.parametrize("codec", SAMPLES)


@each_codec
def test_every_truncation_is_refused(codec: str) -> None:
    stored = SAMPLES[codec]
    for size in range(len(stored)):
        refused(stored[:size], codec, RAW_SIZES[codec])


@each_codec
@pytest.mark.parametrize("junk", [b"\0", b"junk", SAMPLES["zstd"], b"\x50\x2a\x4d\x18\x04\0\0\0abcd"])
def test_trailing_bytes_are_refused(codec: str, junk: bytes) -> None:
    refused(SAMPLES[codec] + junk, codec, RAW_SIZES[codec])


@each_codec
@pytest.mark.parametrize("difference", [-1, 1, 1 << 20])
def test_another_raw_size_than_the_index_gives_is_refused(codec: str, difference: int) -> None:
    refused(SAMPLES[codec], codec, RAW_SIZES[codec] + difference)


@each_codec
def test_bytes_for_an_empty_chunk_are_refused(codec: str) -> None:
    refused(zstandard.compress(b""), codec, 0)


@each_codec
def test_nothing_for_a_full_chunk_is_refused(codec: str) -> None:
    refused(b"", codec, 1)


@each_codec
@given(data=st.data())
def test_mutated_frames_decode_or_are_refused(codec: str, data: st.DataObject) -> None:
    """A flipped bit in a mantissa cannot be seen here (the checksum sees it); nothing else than CodecError may come of it."""
    stored = bytearray(SAMPLES[codec])
    for _ in range(data.draw(st.integers(1, 6))):
        position = data.draw(st.integers(0, len(stored) - 1) | st.integers(0, min(60, len(stored) - 1)))
        stored[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        at, size = data.draw(st.integers(0, len(stored))), data.draw(st.integers(0, 40))
        stored[at : at + size] = data.draw(st.binary(max_size=40))
    decode_or_refuse(bytes(stored), codec, RAW_SIZES[codec])


@each_codec
@given(stored=st.binary(max_size=200), raw_size=st.integers(0, 300))
def test_arbitrary_bytes_decode_or_are_refused(codec: str, stored: bytes, raw_size: int) -> None:
    decode_or_refuse(stored, codec, raw_size)


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    rotation=st.integers(0, 2),
    sizes=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 12), min_size=8, max_size=8),
    methods=st.lists(st.integers(0, 2), min_size=8, max_size=8),
    body=st.binary(max_size=100),
    raw_size=st.integers(0, 100),
)
def test_well_formed_headers_with_any_numbers_decode_or_are_refused(
    width: int, rotation: int, sizes: list[int], methods: list[int], body: bytes, raw_size: int
) -> None:
    table = b"".join(struct.pack("<BQ", *entry) for entry in zip(methods[:width], sizes[:width], strict=True))
    stored = struct.pack("<BBBBQ", 1, width, rotation, 0, raw_size) + table + body
    decode_or_refuse(stored, "planes", raw_size)


def decode_or_refuse(stored: bytes, codec: str, raw_size: int) -> None:
    memory = np.full(GUARD + raw_size + GUARD, 0xEE, dtype=np.uint8)
    try:
        decode(stored, codec=codec, raw_size=raw_size, out=memory[GUARD:-GUARD])
    except CodecError:
        assert (memory == 0xEE).all()
    assert (memory[:GUARD] == 0xEE).all()
    assert (memory[-GUARD:] == 0xEE).all()


def without_content_size(raw: bytes) -> bytes:
    params = zstandard.ZstdCompressionParameters.from_level(1, write_content_size=0)
    return zstandard.ZstdCompressor(compression_params=params).compress(raw)


def with_window(raw: bytes, window_log: int) -> bytes:
    """A frame with a window of its own: not of the single-segment form, whose window is the content."""
    compressor = zstandard.ZstdCompressor(
        compression_params=zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log, force_max_window=1)
    ).compressobj()
    return compressor.compress(raw) + compressor.flush()


def zstd_header(content_size: int, window_log: int | None = None, dict_id: int = 0) -> bytes:
    """A frame header with an 8-byte content size; a window descriptor where given, else single-segment."""
    descriptor = 0b11_0_0_0_0_00 | (0b1_00000 if window_log is None else 0) | (1 if dict_id else 0)
    window = b"" if window_log is None else bytes([(window_log - 10) << 3])
    dictionary = bytes([dict_id]) if dict_id else b""
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + window + dictionary + struct.pack("<Q", content_size)


RAW_BLOCK_OF_4 = bytes([1 | 4 << 3, 0, 0]) + b"abcd"


def test_the_header_made_here_is_one_that_decodes() -> None:
    for stored in (zstd_header(4) + RAW_BLOCK_OF_4, zstd_header(4, window_log=23) + RAW_BLOCK_OF_4):
        out = bytearray(4)
        decode(stored, codec="zstd", raw_size=4, out=memoryview(out))
        assert bytes(out) == b"abcd"


def test_zstd_frames_that_the_format_forbids_are_refused() -> None:
    assert "not 2400" in refused(without_content_size(RAW[:2400]), "zstd", 2400)
    assert f"more than {WINDOW_MAX}" in refused(zstd_header(4, window_log=24) + RAW_BLOCK_OF_4, "zstd", 4)
    assert "dictionary 7" in refused(zstd_header(4, dict_id=7) + RAW_BLOCK_OF_4, "zstd", 4)
    assert "no zstd frame" in refused(b"\x50\x2a\x4d\x18\x04\0\0\0abcd", "zstd", 4)
    assert "declares 4" in refused(zstd_header(4) + RAW_BLOCK_OF_4, "zstd", 5)


def test_a_frame_that_holds_less_than_it_declares_is_refused() -> None:
    refused(zstd_header(5) + RAW_BLOCK_OF_4, "zstd", 5)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (planes_frame((0, b"abcd"), raw_size=4, head=b"\x02\x01\x01\x00"), "version 2.0"),
        (planes_frame((0, b"abcd"), raw_size=4, head=b"\x01\x01\x01\x01"), "version 1.1"),
        (planes_frame((0, b"abcd"), raw_size=4, head=b"\x01\x00\x01\x00"), "elements of 0 bytes"),
        (planes_frame((0, b"abcd"), raw_size=4, head=b"\x01\x03\x01\x00"), "elements of 3 bytes"),
        (planes_frame((0, b"abcd"), raw_size=4, head=b"\x01\x01\x02\x00"), "rotated by 2"),
        (planes_frame((0, b"abcd"), raw_size=5), "declares 5 bytes, not 4"),
        (planes_frame((0, b"abcd"), raw_size=2**64 - 1), "not 4"),
        (planes_frame((2, b"abcd"), raw_size=4), "method 2"),
        (planes_frame((0, b"abc"), raw_size=4), "raw plane has 3 bytes, not 4"),
        (planes_frame((0, b"abcde"), raw_size=4), "raw plane has 5 bytes, not 4"),
        (planes_frame((1, zstandard.compress(b"abcde")), raw_size=4), "declares 5 bytes, not 4"),
        (planes_frame((0, b"abc"), (0, b"d"), raw_size=4, head=b"\x01\x02\x01\x00"), "raw plane has 3 bytes, not 2"),
        (planes_frame((0, b"abcd"), raw_size=4, tail=b"e"), "26 bytes, its header accounts for 25"),
        (planes_frame((0, b"abcd"), raw_size=4)[:15], "too few for its table"),
        (b"\x01\x01\x01", "too few for its header"),
    ],
)
def test_malformed_planes_frames_say_what_is_wrong(stored: bytes, message: str) -> None:
    assert message in refused(stored, "planes", 4)


def test_bodies_for_planes_without_elements_are_refused() -> None:
    empty = (0, b"")
    for method in (0, 1):
        stored = planes_frame(empty, empty, empty, (method, b"ab"), raw_size=3, head=b"\x01\x04\x01\x00", tail=b"abc")
        refused(stored, "planes", 3)


def bombs() -> dict[str, tuple[str, bytes]]:
    huge = 1 << 40
    bomb = zstandard.compress(bytes(64 << 20))
    return {
        "declared": ("zstd", zstd_header(huge) + RAW_BLOCK_OF_4),
        "real": ("zstd", bomb),
        "window": ("zstd", zstd_header(100, window_log=41) + RAW_BLOCK_OF_4),
        "without content size": ("zstd", without_content_size(bytes(64 << 20))),
        "in a plane": ("planes", planes_frame((1, bomb), raw_size=100)),
        "declared frame": ("planes", planes_frame((0, b"abcd"), raw_size=huge)),
        "declared plane": ("planes", b"\x01\x01\x01\x00" + struct.pack("<QBQ", 100, 0, huge)),
    }


@pytest.mark.parametrize("name", bombs())
def test_bombs_are_refused_in_bounded_memory(name: str) -> None:
    codec, stored = bombs()[name]
    tracemalloc.start()
    try:
        refused(stored, codec, 100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
