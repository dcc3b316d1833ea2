"""Converts floats of one width to another by way of float32. It rounds as torch does: to nearest, ties to even.

Elements come and go as unsigned integers that carry their bits, since bfloat16 and the 8-bit floats have no numpy dtype.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[Any]

FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
FLOATS = frozenset(("float64", "float32", "float16", "bfloat16", *FLOAT8))
"""The dtypes that are converted. Integers, flags, complex numbers and packed elements keep their dtype."""

TARGETS = ("float32", "bfloat16")
_BLOCK = 1 << 16
"""Elements converted at a time, so that intermediate arrays are small and stay in the processor's cache."""
_NAN_BFLOAT16 = 0x7FC0
_INFINITY_FLOAT32 = 0x7F800000
_QUIET = 0x00400000
_NAN_E4M3FN, _NAN_UNSIGNED = 0x7FF00000, 0x7F800001
"""The float32 bits to which torch converts the NaN of float8_e4m3fn, and the NaN of formats with a single NaN."""


def target_of(dtype: str, wanted: str | None) -> str:
    """The dtype of elements of `dtype` after floats were converted to `wanted`; None converts nothing."""
    return wanted if wanted is not None and dtype in FLOATS else dtype


def convert(elements: Elements, source: str, target: str) -> Elements:
    """`elements` of dtype `source` as dtype `target`, both as unsigned integers of their width. Takes any shape and strides.

    Raises:
        ValueError: `source` is not in FLOATS, or `target` is not in TARGETS.
    """
    if source == target:
        return elements
    if source not in FLOATS or target not in TARGETS:
        raise ValueError(f"cannot convert {source} to {target}")
    flat = np.ascontiguousarray(elements).reshape(-1)
    made = np.empty(flat.size, np.uint32 if target == "float32" else np.uint16)
    for start in range(0, flat.size, _BLOCK):
        wide = _to_float32(flat[start : start + _BLOCK], source)
        made[start : start + _BLOCK] = wide if target == "float32" else _to_bfloat16(wide)
    return made.reshape(elements.shape)


def _to_float32(elements: Elements, source: str) -> Elements:
    """The bits of the same numbers as float32."""
    if source == "float32":
        return elements
    if source == "bfloat16":
        wide = elements.astype(np.uint32)
        wide <<= 16
        return wide
    if source in FLOAT8:
        return _table(source)[elements]
    with np.errstate(over="ignore", invalid="ignore"):
        wide = elements.view("f8" if source == "float64" else "f2").astype("f4").view(np.uint32)
    # Processors turn every NaN into a quiet NaN when the width changes.
    wide[(wide & 0x7FFFFFFF) > _INFINITY_FLOAT32] |= _QUIET
    return wide


def _to_bfloat16(bits: Elements) -> Elements:
    """The upper halves of float32 bits, rounded. Every NaN becomes the quiet NaN of torch's rounding function, although torch's
    vectorized loops give 0xFFFF or 0x7FFF on some processors and devices.
    """
    rounding = (bits >> 16) & 1
    rounding += 0x7FFF
    rounding += bits
    rounding >>= 16
    rounded: Elements = rounding.astype(np.uint16)
    rounded[(bits & 0x7FFFFFFF) > _INFINITY_FLOAT32] = _NAN_BFLOAT16
    return rounded


@cache
def _table(dtype: str) -> Elements:
    """The float32 bits of all 256 values of an 8-bit float."""
    return np.array([_float8_bits(dtype, byte) for byte in range(256)], dtype=np.uint32)


def _float8_bits(dtype: str, byte: int) -> int:
    """Float32 bits of one 8-bit float (OCP 8-bit Floating Point Specification, and the `fnuz` variants of 2206.02915)."""
    if dtype == "float8_e8m0fnu":
        return _NAN_UNSIGNED if byte == 0xFF else _bits(2.0 ** (byte - 127))
    mantissa_bits = 3 if "e4m3" in dtype else 2
    sign, rest = byte >> 7, byte & 0x7F
    exponent, mantissa = rest >> mantissa_bits, rest & ((1 << mantissa_bits) - 1)
    special = _special(dtype, byte, exponent, mantissa)
    if special is not None:
        return special
    bias = (7 if mantissa_bits == 3 else 15) + dtype.endswith("fnuz")
    value = (mantissa / (1 << mantissa_bits) + (exponent > 0)) * 2.0 ** (max(exponent, 1) - bias)
    return _bits(-value if sign else value)


def _special(dtype: str, byte: int, exponent: int, mantissa: int) -> int | None:
    """The float32 bits of an infinity or a NaN; None for a finite number."""
    sign = (byte >> 7) << 31
    if dtype.endswith("fnuz"):
        return _NAN_UNSIGNED if byte == 0x80 else None
    if dtype == "float8_e4m3fn":
        return sign | _NAN_E4M3FN if byte & 0x7F == 0x7F else None
    if exponent < 31:
        return None
    return sign | _INFINITY_FLOAT32 | mantissa << 21 | (_QUIET if mantissa else 0)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))
