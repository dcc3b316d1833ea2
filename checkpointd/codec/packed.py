"""A packed object: a small frame around one zstd frame, which declares how large its content is.

16 bytes: the magic `ckptpack`, and the size of the content in bytes, 64 bits, little-endian. One zstd frame of exactly that
content follows.
"""

from __future__ import annotations

import struct

import numpy as np

from checkpointd.codec import zstd
from checkpointd.errors import CodecError

EXPANSION_MAX = 512
EXPANDED_BYTES_MIN = 1 << 20
"""A reader takes at most so many times the bytes of a packed object, or so many bytes. Names and boxes of tensors become about
50 to 120 times smaller."""

_MAGIC = b"ckptpack"
_HEAD = struct.Struct("<8sQ")


def pack(content: bytes) -> bytes:
    """`content`, at least one byte, as a packed object. What would become smaller than a reader believes is not compressed."""
    head, array = _HEAD.pack(_MAGIC, len(content)), np.frombuffer(content, np.uint8)
    data = head + zstd.general(array)
    return data if len(content) <= _most(data) else head + zstd.uncompressed(array)


def unpack(data: bytes | bytearray, size_max: int) -> memoryview:
    """The content of a packed object. Raises CodecError if `data` is anything else, or declares more than `size_max` bytes,
    of which nothing is then allocated.
    """
    if len(data) < _HEAD.size:
        raise CodecError(f"{len(data)} bytes are too few for a packed object")
    magic, size = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise CodecError("no packed object begins here")
    if not 0 < size <= min(size_max, _most(data)):
        most = min(size_max, _most(data))
        raise CodecError(f"it declares {size} bytes of content in {len(data)} bytes, and at most {most} are allowed")
    return zstd.decompress(np.frombuffer(data, np.uint8)[_HEAD.size :], size).data


def _most(data: bytes | bytearray) -> int:
    return max(EXPANDED_BYTES_MIN, EXPANSION_MAX * len(data))
