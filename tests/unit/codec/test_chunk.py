"""`encode` and `decode`: every bit of every length comes back, and arguments that cannot work are refused."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import CODECS, decode, encode, stored_size_max
from checkpointd.codec.buffers import Buffer, byte_view
from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.codec.zstd import decompress, general, huffman
from checkpointd.errors import CodecError

ELEMENTS = [(width, kind) for width in (1, 2, 4, 8) for kind in ("float", "other")]
each_codec = pytest.mark.parametrize("codec", CODECS)
each_element = pytest.mark.parametrize(("itemsize", "kind"), ELEMENTS)


def decoded(stored: Buffer, codec: str, raw_size: int) -> bytes:
    out = np.full(raw_size, 0xEE, dtype=np.uint8)
    decode(stored, codec=codec, raw_size=raw_size, out=out)
    return out.tobytes()


def round_trip(raw: Buffer, codec: str, itemsize: int, kind: str) -> bytes:
    return decoded(encode(raw, codec=codec, itemsize=itemsize, kind=kind), codec, byte_view(raw).size)


def weights(count: int, dtype: str = "<f4") -> np.ndarray[Any, Any]:
    return (np.random.default_rng(3).standard_normal(count) * 0.02).astype(dtype)


@each_codec
@each_element
def test_all_lengths_from_0_to_70(codec: str, itemsize: int, kind: str) -> None:
    for size in range(71):
        for raw in (np.random.default_rng(size).bytes(size), bytes(size)):
            assert round_trip(raw, codec, itemsize, kind) == raw


@each_codec
@each_element
@given(raw=st.binary(max_size=300) | st.binary(max_size=12).map(lambda run: run * 97))
def test_any_bytes_come_back(codec: str, itemsize: int, kind: str, raw: bytes) -> None:
    assert round_trip(raw, codec, itemsize, kind) == raw


@each_codec
def test_every_16_bit_pattern_comes_back(codec: str) -> None:
    patterns = np.arange(1 << 16, dtype="<u2")
    assert round_trip(patterns, codec, 2, "float") == patterns.tobytes()


SPECIAL = {
    4: [0, 1 << 31, 1, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFBADBAD],
    8: [0, 1 << 63, 1, (1 << 52) - 1, 0x7FF << 52, 0xFFF << 52, (0x7FF << 52) + 1, (0xFFF << 52) + 0xBADBAD],
}


@pytest.mark.parametrize("width", [4, 8])
@each_codec
def test_special_floats_among_ordinary_ones(codec: str, width: int) -> None:
    special = np.array(SPECIAL[width], dtype=f"<u{width}")
    values = np.concatenate([special, weights(70_000, f"<f{width}").view(special.dtype), special])
    assert round_trip(values, codec, width, "float") == values.tobytes()


@pytest.mark.parametrize("width", [2, 4, 8])
def test_large_random_patterns_with_a_tail(width: int) -> None:
    raw = np.random.default_rng(width).bytes((1 << 20) + width - 1)
    assert round_trip(raw, "planes", width, "float") == raw


def test_planes_make_float_weights_smaller() -> None:
    values = weights(1 << 18)
    stored = encode(values, codec="planes", itemsize=4, kind="float")
    assert stored.nbytes < 0.85 * values.nbytes
    assert stored.nbytes < encode(values, codec="zstd", itemsize=4, kind="float").nbytes


def test_mantissa_planes_of_zeros_are_compressed_too() -> None:
    from_bfloat16 = weights(1 << 18).view("<u4") & 0xFFFF0000
    stored = encode(from_bfloat16, codec="planes", itemsize=4, kind="float")
    assert stored.nbytes < 0.4 * from_bfloat16.nbytes


def plane_methods(stored: memoryview, width: int) -> list[int]:
    """How each plane of the frame is stored, the most significant first."""
    return list(bytes(stored)[12 : 12 + 9 * width : 9])


def test_floats_without_a_negative_one_have_one_compressible_plane_and_lose_nothing() -> None:
    values = weights(1 << 18)
    stored = encode(values, codec="planes", itemsize=4, kind="float")
    positive = encode(np.abs(values), codec="planes", itemsize=4, kind="float")
    assert (stored[2], plane_methods(stored, 4)) == (1, [1, 0, 0, 0])
    assert (positive[2], plane_methods(positive, 4)) == (0, [1, 0, 0, 0])
    assert positive.nbytes < stored.nbytes - 0.02 * values.nbytes  # nearly a bit for each sign
    assert round_trip(np.abs(values), "planes", 4, "float") == np.abs(values).tobytes()


def test_planes_full_of_repeats_are_searched_for_them() -> None:
    mostly_zero = np.where(np.random.default_rng(1).random(1 << 18) < 0.01, 7, 0).astype(np.uint8)
    stored = encode(mostly_zero, codec="planes", itemsize=1, kind="other")
    assert stored.nbytes < mostly_zero.nbytes / 16 < len(huffman(mostly_zero))


def test_incompressible_bytes_grow_by_the_header_alone() -> None:
    raw = np.random.default_rng(4).bytes(1 << 20)
    assert encode(raw, codec="planes", itemsize=4, kind="float").nbytes == len(raw) + 12 + 4 * 9


def test_raw_without_out_is_the_data_itself() -> None:
    values = weights(10)
    stored = encode(values, codec="raw", itemsize=4, kind="float")
    assert np.shares_memory(np.frombuffer(stored, np.uint8), values)


@each_codec
@pytest.mark.parametrize("size", [0, 5, 4096, 300_001])
def test_out_takes_the_stored_bytes_and_nothing_beyond_them(codec: str, size: int) -> None:
    raw = np.random.default_rng(size).bytes(size)
    bound = stored_size_max(size)
    memory = np.full(bound + 64, 0xEE, dtype=np.uint8)
    stored = encode(raw, codec=codec, itemsize=4, kind="float", out=memory[:bound])
    assert np.shares_memory(np.frombuffer(stored, np.uint8), memory) or size == 0
    assert (memory[bound:] == 0xEE).all()
    assert bytes(stored) == bytes(encode(raw, codec=codec, itemsize=4, kind="float"))
    assert decoded(stored, codec, size) == raw


@each_codec
def test_decode_leaves_the_rest_of_a_larger_out_alone(codec: str) -> None:
    raw = weights(1000).tobytes()
    memory = bytearray(b"\xee" * 5000)
    stored = encode(raw, codec=codec, itemsize=4, kind="float")
    decode(stored, codec=codec, raw_size=len(raw), out=memoryview(memory)[100:])
    assert bytes(memory) == b"\xee" * 100 + raw + b"\xee" * 900


@each_codec
def test_arrays_of_any_shape_and_scalars_count_as_their_bytes(codec: str) -> None:
    for values in (weights(60).reshape(3, 4, 5), np.array(1.5, "<f4"), np.empty((0, 7), "<f4")):
        assert round_trip(values, codec, 4, "float") == values.tobytes()


def test_unknown_names_and_sizes_are_refused() -> None:
    for raw in (b"", b"abcd"):
        with pytest.raises(ValueError, match="codec is 'gzip', not one of raw, zstd, planes"):
            encode(raw, codec="gzip", itemsize=4, kind="float")
        with pytest.raises(CodecError, match="'gzip' is unknown"):
            decoded(raw, "gzip", len(raw))
    with pytest.raises(ValueError, match="itemsize is 16"):
        encode(b"abcd", codec="raw", itemsize=16, kind="float")
    with pytest.raises(ValueError, match="raw_size is -1"):
        decode(b"", codec="raw", raw_size=-1, out=bytearray(4))  # type: ignore[arg-type]


def test_buffers_that_cannot_work_are_refused() -> None:
    values = weights(100)
    read_only = np.zeros(500, dtype=np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="one C-contiguous run"):
        encode(values[::2], codec="raw", itemsize=4, kind="float")
    with pytest.raises(ValueError, match="one C-contiguous run"):
        encode(memoryview(b"abcd")[::2], codec="raw", itemsize=4, kind="float")
    for out in (read_only, memoryview(bytes(500))):
        with pytest.raises(ValueError, match="out is read-only"):
            decode(values, codec="raw", raw_size=400, out=out)
    with pytest.raises(ValueError, match="out has 399 bytes, 400 are needed"):
        decode(values, codec="raw", raw_size=400, out=np.empty(399, np.uint8))
    with pytest.raises(ValueError, match="out has 400 bytes, 529 are needed"):
        encode(values, codec="raw", itemsize=4, kind="float", out=np.empty(400, np.uint8))


@each_codec
def test_threads_do_not_disturb_each_other(codec: str) -> None:
    chunks = [np.roll(weights(100_000), turn) for turn in range(16)]
    with ThreadPoolExecutor(8) as pool:
        backs = pool.map(lambda chunk: round_trip(chunk, codec, 4, "float"), chunks * 4)
    assert list(backs) == [chunk.tobytes() for chunk in chunks] * 4


WORK = weights(1 << 20)
FRAME = np.frombuffer(general(WORK.view(np.uint8)), dtype=np.uint8)
ROOM = np.empty(stored_size_max(WORK.nbytes), dtype=np.uint8)
PLANES = bytes(encode(WORK, codec="planes", itemsize=4, kind="float"))
HEAVY: dict[str, Callable[[], object]] = {
    "zstd.general": lambda: general(WORK.view(np.uint8)),
    "zstd.huffman": lambda: huffman(WORK.view(np.uint8)),
    "zstd.decompress": lambda: decompress(FRAME, WORK.nbytes),
    "encode": lambda: encode(WORK, codec="planes", itemsize=4, kind="float", out=ROOM),
    "decode": lambda: decode(PLANES, codec="planes", raw_size=WORK.nbytes, out=ROOM),
    "copy": lambda: decode(WORK, codec="raw", raw_size=WORK.nbytes, out=ROOM),
    "xxh3_64": lambda: xxh3_64(WORK),
    "xxh3_128": lambda: xxh3_128(WORK),
}


@pytest.mark.parametrize("work", HEAVY.values(), ids=HEAVY.keys())
def test_other_threads_run_during_heavy_work(work: Callable[[], object]) -> None:
    """Nobody is made to give up the GIL here, so another thread runs during the work only if the work releases it."""
    stop, ticks = threading.Event(), [0]

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0)  # hands the GIL back, which nothing else would

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        assert any(_ticked_during(work, ticks) for _ in range(1000))
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        ticker.join()


def _ticked_during(work: Callable[[], object], ticks: list[int]) -> bool:
    before = ticks[0]
    work()
    return ticks[0] != before
