"""Elements <-> byte planes: plane i holds byte i of every element, 0 the least significant, after a rotation.

For floats, rotating left by one bit moves the sign to the end, so the exponent begins at the top byte. The top plane then has
few different values, which zstd compresses well. Floats without a negative one among them, such as Adam's exp_avg_sq, are not
rotated: then only the top plane is compressible, and not a second one whose last bit is always 0.

The numpy calls take whole arrays on purpose: each call gives up the GIL once and may wait up to 5 ms to get it back from a
trainer that computes in Python, so a loop over small blocks would be far slower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpointd.codec.buffers import Bytes

# Elements merged at once. This bounds the temporary array to 1 MiB without loss of speed.
_MERGE_ELEMENTS = 1 << 17


def has_sign(elements: Bytes, *, itemsize: int) -> bool:
    """Whether the top bit of any of `elements` (n * itemsize bytes) is set."""
    words = elements.view(f"<i{itemsize}")
    return bool(words.size and words.min() < 0)


def split_plane(elements: Bytes, *, itemsize: int, index: int, rotation: int, out: Bytes) -> None:
    """Write plane `index` of `elements` (n * itemsize bytes), rotated left by `rotation` (0 or 1) bits, to `out` (n bytes)."""
    words = _words(elements, itemsize)
    shift = 8 * index - rotation
    # numpy casts in small buffers that stay in the cache, without a temporary array of the elements' size.
    if shift >= 0:
        np.right_shift(words, shift, out=out, dtype=words.dtype, casting="unsafe")
        return
    # The lowest plane ends with the sign bit. Bytes and comparisons are several times faster here than shifts of words.
    sign = np.less(words.view(f"<i{itemsize}"), 0)
    np.copyto(out, words, casting="unsafe")
    np.add(out, out, out=out)
    np.bitwise_or(out, sign.view(np.uint8), out=out)


def merge_planes(planes: Sequence[Bytes], *, rotation: int, out: Bytes) -> None:
    """Undo the split: `planes[i]` is plane i, n bytes each; `out` takes n * len(planes) bytes."""
    words = _words(out, len(planes))
    scratch = np.empty(min(words.size, _MERGE_ELEMENTS), dtype=words.dtype)
    for start in range(0, words.size, _MERGE_ELEMENTS):
        part = words[start : start + _MERGE_ELEMENTS]
        _merge(part, [plane[start : start + part.size] for plane in planes], rotation, scratch[: part.size])


def _merge(words: NDArray[Any], planes: Sequence[Bytes], rotation: int, scratch: NDArray[Any]) -> None:
    np.copyto(words, planes[-1])
    for plane in reversed(planes[:-1]):
        np.left_shift(words, 8, out=words)
        np.copyto(scratch, plane)
        np.bitwise_or(words, scratch, out=words)
    if rotation:
        np.left_shift(words, 8 * words.itemsize - rotation, out=scratch)
        np.right_shift(words, rotation, out=words)
        np.bitwise_or(words, scratch, out=words)


def _words(data: Bytes, itemsize: int) -> NDArray[Any]:
    return data.view(np.dtype(f"<u{itemsize}"))
