"""Byte planes: what lies in which plane, and that every bit comes back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec.buffers import Bytes
from checkpointd.codec.planes import _MERGE_ELEMENTS, merge_planes, split_plane

WIDTHS = [1, 2, 4, 8]


def split(raw: bytes, width: int, rotation: int) -> list[Bytes]:
    elements = np.frombuffer(raw, dtype=np.uint8)
    planes = [np.empty(len(raw) // width, dtype=np.uint8) for _ in range(width)]
    for index, plane in enumerate(planes):
        split_plane(elements, itemsize=width, index=index, rotation=rotation, out=plane)
    return planes


def merged(planes: list[Bytes], rotation: int) -> bytes:
    out = np.empty(sum(plane.size for plane in planes), dtype=np.uint8)
    merge_planes(planes, rotation=rotation, out=out)
    return out.tobytes()


def rotated_left(word: int, rotation: int, bits: int) -> int:
    return (word << rotation | word >> bits - rotation) & (1 << bits) - 1


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rotation", [0, 1])
@given(data=st.data())
def test_planes_are_the_bytes_of_the_rotated_integers(width: int, rotation: int, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.integers(0, 2 ** (8 * width) - 1), max_size=20))
    raw = b"".join(word.to_bytes(width, "little") for word in words)
    planes = split(raw, width, rotation)
    for index, plane in enumerate(planes):
        expected = [rotated_left(word, rotation, 8 * width) >> 8 * index & 255 for word in words]
        assert plane.tolist() == expected
    assert merged(planes, rotation) == raw


@pytest.mark.parametrize("rotation", [0, 1])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_16_bit_pattern_comes_back(width: int, rotation: int) -> None:
    patterns = np.random.default_rng(1).permutation(1 << 16).astype("<u2").tobytes()
    assert merged(split(patterns, width, rotation), rotation) == patterns


def test_top_plane_of_a_rotated_float_is_its_exponent() -> None:
    values = np.array([1.0, -1.0, 2.0, -0.0, np.inf, -np.nan, 1e-45], dtype="<f4")
    planes = split(values.tobytes(), 4, 1)
    assert planes[3].tolist() == [127, 127, 128, 0, 255, 255, 0]
    assert [int(low) & 1 for low in planes[0]] == [0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [_MERGE_ELEMENTS - 1, _MERGE_ELEMENTS, 2 * _MERGE_ELEMENTS + 1])
def test_merging_in_blocks_loses_nothing_at_their_edges(width: int, count: int) -> None:
    raw = np.random.default_rng(count).bytes(count * width)
    assert merged(split(raw, width, 1), 1) == raw


@pytest.mark.parametrize("width", [2, 4, 8])
def test_elements_need_not_be_aligned_in_memory(width: int) -> None:
    memory = np.random.default_rng(2).integers(0, 256, 8 * 1001, dtype=np.uint8)
    elements = memory[1 : 1 + 8 * 1000]
    planes = split(elements.tobytes(), width, 1)
    for index in range(width):
        plane = np.empty_like(planes[index])
        split_plane(elements, itemsize=width, index=index, rotation=1, out=plane)
        assert np.array_equal(plane, planes[index])
    back = np.zeros(8 * 1000 + 1, dtype=np.uint8)[1:]
    merge_planes(planes, rotation=1, out=back)
    assert np.array_equal(back, elements)
