"""The properties of a tensor's elements that codecs need: their width, and whether they are floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

Kind: TypeAlias = Literal["float", "other"]
"""`float`: one sign bit, then the exponent, then the mantissa, from the most significant bit on. `other`: anything else."""

WIDTHS = (1, 2, 4, 8)

# The dtypes that numpy does not have. A complex number is two floats, one after the other.
_TORCH_ONLY: dict[str, tuple[int, Kind]] = {"bfloat16": (2, "float"), "complex32": (2, "float")}


@dataclass(frozen=True, slots=True)
class ElementType:
    """One element: `itemsize` in bytes (1, 2, 4 or 8) and its `kind`; little-endian.

    Codecs do not need the width of the exponent. Once the sign bit has moved to the end, the exponent of every float begins at
    the top bit: 8 bits (bfloat16, float32) fill the top byte, the 11 bits of float64 run over into the next byte, and the 5
    bits of float16 share the top byte with mantissa bits.

    Raises:
        ValueError: another itemsize or kind.
    """

    itemsize: int
    kind: Kind

    def __post_init__(self) -> None:
        if self.itemsize not in WIDTHS:
            raise ValueError(f"itemsize is {self.itemsize}, not one of {WIDTHS}; a complex number counts as two floats")
        if self.kind not in ("float", "other"):
            raise ValueError(f"kind is {self.kind!r}, not 'float' or 'other'")

    @property
    def rotation(self) -> int:
        """The number of bits by which each element is rotated left before the split: 1 for floats of several bytes, else 0."""
        return 1 if self.kind == "float" and self.itemsize > 1 else 0

    @classmethod
    def of_dtype(cls, dtype: str) -> ElementType:
        """The element of a dtype named as torch (`bfloat16`, `float8_e4m3fn`) or numpy (`<f4`) name it.

        An unknown or odd-sized dtype counts as single bytes. Every codec stores them correctly, but `planes` gains nothing.
        """
        if dtype in _TORCH_ONLY:
            return cls(*_TORCH_ONLY[dtype])
        if dtype.startswith("float8_"):
            return cls(1, "float")
        try:
            known = np.dtype(dtype)
        except (TypeError, ValueError):
            return cls(1, "other")
        return _of_numpy(known)


def _of_numpy(dtype: np.dtype[np.generic]) -> ElementType:
    itemsize = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
    if dtype.kind not in "fciu" or itemsize not in WIDTHS:
        return ElementType(1, "other")
    # Rotation would not help a big-endian float, whose exponent is in the last byte. Its planes still compress.
    is_float = dtype.kind in "fc" and dtype == dtype.newbyteorder("<")
    return ElementType(itemsize, "float" if is_float else "other")
