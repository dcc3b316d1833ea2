"""The difference between two chunks of the same size, element by element: nearly equal elements give small numbers.

Elements count as unsigned integers, and the difference wraps. Its sign goes to the lowest bit (zigzag), so small differences of
either sign have zero bytes above them, which the codec `planes` then shrinks. Between floats this is about the number of floats
that lie between the two. An exclusive or would change the upper bytes wherever a carry runs into them. `docs/format/CODECS.md`
describes the stored bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from checkpointd.codec.buffers import Buffer, Bytes, byte_view
from checkpointd.codec.chunk import decode


def difference(data: Buffer, base: Buffer, *, itemsize: int) -> Bytes:
    """`data` less `base`, both of the same size, as zigzag integers of `itemsize` bytes. The bytes after the last whole element
    are those of `data`.
    """
    raw, before = byte_view(data), byte_view(base)
    made = np.empty(raw.size, dtype=np.uint8)
    whole = raw.size - raw.size % itemsize
    words = _words(made[:whole], itemsize)
    np.subtract(_words(raw[:whole], itemsize), _words(before[:whole], itemsize), out=words)
    sign = np.right_shift(words.view(f"<i{itemsize}"), 8 * itemsize - 1).view(words.dtype)
    np.left_shift(words, 1, out=words)
    np.bitwise_xor(words, sign, out=words)
    made[whole:] = raw[whole:]
    return made


def decode_delta(stored: Buffer, base: Buffer, *, out: Bytes) -> None:
    """Write the raw bytes of the chunk that is `stored` as its difference from the raw bytes `base` to `out`.

    `base` and `out` have the same size, at least one byte.

    Raises:
        CodecError: `stored` is not a frame of `planes` for this size.
    """
    decode(stored, codec="planes", raw_size=out.size, out=out)
    itemsize = int(byte_view(stored)[1])  # checked by `decode`
    whole = out.size - out.size % itemsize
    words = _words(out[:whole], itemsize)
    # Zigzag: the sign is the lowest bit; a negative number has all other bits inverted.
    sign = np.bitwise_and(words, 1)
    np.negative(sign, out=sign)
    np.right_shift(words, 1, out=words)
    np.bitwise_xor(words, sign, out=words)
    np.add(words, _words(byte_view(base)[:whole], itemsize), out=words)


def _words(data: Bytes, itemsize: int) -> NDArray[Any]:
    return data.view(np.dtype(f"<u{itemsize}"))
