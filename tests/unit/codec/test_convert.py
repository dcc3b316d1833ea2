"""Conversions of floats against torch, bit for bit, over every pattern of the narrow ones and the telling ones of the wide."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from checkpointd.codec.convert import FLOATS, TARGETS, convert, target_of
from checkpointd.layout.dtypes import ITEM_BYTES

LOWER = (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
"""Lower halves of a float32 on both sides of a tie, and on it."""
CARRIERS = {1: (np.uint8, torch.uint8), 2: (np.uint16, torch.int16), 4: (np.uint32, torch.int32), 8: (np.uint64, torch.int64)}


def patterns(dtype: str) -> NDArray[np.generic]:
    """Bits of elements: all of the 8- and 16-bit floats; of the wider ones every sign, exponent and way of rounding."""
    width = ITEM_BYTES[dtype]
    if width < 4:
        return np.arange(1 << 8 * width, dtype=CARRIERS[width][0])
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    singles = np.concatenate([upper | low for low in LOWER])
    if dtype == "float32":
        return singles
    # Every float32 as float64, one bit to either side, ties between two float32, and random bits: NaN, tiny, huge.
    with np.errstate(invalid="ignore"):
        wide = singles.view(np.float32).astype(np.float64).view(np.uint64)
    random = np.random.default_rng(0).integers(0, 1 << 64, 1 << 18, dtype=np.uint64)
    tie = np.uint64(1 << 28)
    return np.concatenate([wide, wide + np.uint64(1), wide - np.uint64(1), wide + tie, wide + (tie | np.uint64(1)), random])


def by_torch(bits: NDArray[np.generic], source: str, target: str) -> NDArray[np.generic]:
    """What torch makes of each element alone: its vectorised loops treat NaN in another way than the ends of them."""
    carrier = torch.from_numpy(bits.view(f"i{bits.itemsize}" if bits.itemsize > 1 else "u1").copy())
    tensor = carrier.view(getattr(torch, source)).to(getattr(torch, target))
    width = ITEM_BYTES[target]
    return tensor.view(CARRIERS[width][1]).numpy().view(CARRIERS[width][0])


def is_nan(bits: NDArray[np.generic], target: str) -> NDArray[np.bool_]:
    magnitude, infinity = (0x7FFFFFFF, 0x7F800000) if target == "float32" else (0x7FFF, 0x7F80)
    return np.asarray((bits & magnitude) > infinity)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", sorted(FLOATS))
def test_every_number_becomes_what_torch_makes_of_it(source: str, target: str) -> None:
    bits = patterns(source)
    found, expected = convert(bits, source, target), by_torch(bits, source, target)
    numbers = ~is_nan(expected, target)
    assert np.array_equal(is_nan(found, target), ~numbers)
    assert np.array_equal(found[numbers], expected[numbers])
    if target == "bfloat16" and source != target:
        assert set(found[~numbers].tolist()) <= {0x7FC0}, "torch makes 0x7FC0, 0x7FFF or 0xFFFF of it, by device and dtype"
    elif platform.machine() == "x86_64":
        assert np.array_equal(found, expected), "payloads of NaN as well"


def test_what_is_no_float_stays_what_it_is() -> None:
    for dtype in ITEM_BYTES.keys() - FLOATS:
        assert target_of(dtype, "bfloat16") == dtype
        with pytest.raises(ValueError, match="cannot convert"):
            convert(np.zeros(3, np.uint8), dtype, "bfloat16")
    assert (target_of("float16", None), target_of("float16", "float32")) == ("float16", "float32")


def test_elements_may_lie_anywhere() -> None:
    bits = np.arange(0, 1 << 32, 7919, dtype=np.uint64).astype(np.uint32)[: 600 * 900].reshape(600, 900)
    part = bits[3:200:7, 5:800:3].T
    assert np.array_equal(convert(part, "float32", "bfloat16"), convert(part.copy(), "float32", "bfloat16"))
    for source, dtype in (("float64", np.uint64), ("float16", np.uint16), ("bfloat16", np.uint16), ("float8_e5m2", np.uint8)):
        strided = (part % 251).astype(dtype)[::2]
        assert np.array_equal(convert(strided, source, "float32"), convert(strided.copy(), source, "float32"))
    assert convert(np.array(0x40490FDB, np.uint32), "float32", "bfloat16").shape == ()
