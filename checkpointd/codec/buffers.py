"""Flat views of bytes that the caller owns. The views are numpy arrays, since copies of a memoryview hold the GIL."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
"""Any C-contiguous run of bytes. Arrays may have any shape and dtype: their bytes count, not their elements."""

Bytes: TypeAlias = NDArray[np.uint8]
"""A flat array of bytes."""


def byte_view(data: Buffer) -> Bytes:
    """The bytes of `data` as a flat array, without a copy.

    Raises:
        ValueError: `data` is not C-contiguous.
    """
    try:
        return np.frombuffer(data, dtype=np.uint8)
    except (BufferError, ValueError) as error:
        raise ValueError(f"the bytes of a chunk must lie in one C-contiguous run: {error}") from error


def writable_view(out: memoryview | NDArray[Any], size_min: int) -> Bytes:
    """The bytes of `out` as a flat array to write to.

    Raises:
        ValueError: `out` is read-only, not C-contiguous, or smaller than `size_min` bytes.
    """
    view = byte_view(out)
    if not view.flags.writeable:
        raise ValueError("out is read-only")
    if view.size < size_min:
        raise ValueError(f"out has {view.size} bytes, {size_min} are needed")
    return view
