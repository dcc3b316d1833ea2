"""The stored bytes of the codec `planes`: a header, then the planes, then the tail (the bytes after the last whole element).

All integers are little-endian; `docs/format/CODECS.md` has the table. Invariants:
- the most significant plane comes first, in the table and in the bodies;
- the bodies and the tail fill the frame exactly: no gap, no trailing byte;
- a frame is never larger than header_size(itemsize) + raw_size.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from checkpointd.codec import zstd
from checkpointd.codec.buffers import Bytes
from checkpointd.codec.element import WIDTHS, ElementType
from checkpointd.codec.planes import merge_planes, split_plane
from checkpointd.errors import CodecError

VERSION = 1
RAW, ZSTD = 0, 1
METHODS = (RAW, ZSTD)

_HEAD = struct.Struct("<BBBBQ")
_PLANE = struct.Struct("<BQ")

SAMPLE_RUNS, SAMPLE_BYTES = 3, 16 << 10
"""A plane is sampled in this many runs of this many bytes to learn whether zstd is worth its time."""
SAMPLE_RATIO_MAX = 0.95
"""A plane is stored raw, at the cost of a copy, if zstd saves less than a twentieth of its sample. The lowest plane of Adam's
exp_avg_sq, whose sign bit is always 0, is just worth it: it saves an eighth."""


def header_size(itemsize: int) -> int:
    """Bytes before the first plane."""
    return _HEAD.size + itemsize * _PLANE.size


def encode_frame(raw: Bytes, element: ElementType, out: Bytes) -> int:
    """Write the frame of `raw` to `out`, which has at least header_size + raw.size bytes. Returns the frame's size.

    Each plane is split in place in `out`; if zstd shrinks it, its compressed form replaces it there.
    """
    width, rotation = element.itemsize, element.rotation
    count = raw.size // width
    elements = raw[: count * width]
    position = header_size(width)
    table: list[tuple[int, int]] = []
    for index in reversed(range(width)):
        target = out[position : position + count]
        split_plane(elements, itemsize=width, index=index, rotation=rotation, out=target)
        table.append(_pack(target))
        position += table[-1][1]
    tail = raw[count * width :]
    out[position : position + tail.size] = tail
    header = _HEAD.pack(VERSION, width, rotation, 0, raw.size) + b"".join(_PLANE.pack(*entry) for entry in table)
    out[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    return position + tail.size


def _pack(plane: Bytes) -> tuple[int, int]:
    """Compress `plane` in place if that is worth it. Returns its method and stored length."""
    if plane.size and _is_compressible(plane):
        packed = zstd.compress(plane, zstd.ENTROPY)
        if len(packed) < plane.size:
            plane[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
            return ZSTD, len(packed)
    return RAW, plane.size


def _is_compressible(plane: Bytes) -> bool:
    stride = plane.size // SAMPLE_RUNS
    if stride <= SAMPLE_BYTES:
        return True  # as small as its sample: trying costs no more
    runs = plane[: SAMPLE_RUNS * stride].reshape(SAMPLE_RUNS, stride)[:, :SAMPLE_BYTES]
    taken = np.frombuffer(runs.tobytes(), dtype=np.uint8)
    return len(zstd.compress(taken, zstd.ENTROPY)) <= SAMPLE_RATIO_MAX * taken.size


@dataclass(frozen=True, slots=True)
class _Header:
    width: int
    rotation: int
    count: int
    """Elements."""
    tail_size: int
    """Bytes after the last whole element."""
    planes: tuple[tuple[int, int], ...]
    """Method and stored length, the most significant plane first."""


def decode_frame(stored: Bytes, out: Bytes) -> None:
    """Write the raw bytes of the frame `stored`, exactly out.size of them, to `out`.

    `out` is written only after all of the frame has been checked and decompressed.

    Raises:
        CodecError: `stored` is not a frame of this version, or not of out.size bytes.
    """
    header = _read_header(stored, out.size)
    position = header_size(header.width)
    planes: list[Bytes] = []
    for method, size in header.planes:
        planes.append(_unpack(stored[position : position + size], method, header.count))
        position += size
    body_size = out.size - header.tail_size
    merge_planes(planes[::-1], rotation=header.rotation, out=out[:body_size])
    out[body_size:] = stored[position:]


def _read_header(stored: Bytes, raw_size: int) -> _Header:
    if stored.size < _HEAD.size:
        raise CodecError(f"the frame has {stored.size} bytes, too few for its header")
    version, width, rotation, reserved, declared = _HEAD.unpack_from(stored.data)
    if version != VERSION or reserved != 0:
        raise CodecError(f"the frame is of version {version}.{reserved}; this reader knows {VERSION}.0")
    if width not in WIDTHS or rotation not in (0, 1):
        raise CodecError(f"the frame has elements of {width} bytes rotated by {rotation} bits, which do not exist")
    if declared != raw_size:
        raise CodecError(f"the frame declares {declared} bytes, not {raw_size}")
    count, tail_size = divmod(raw_size, width)
    header = _Header(width, rotation, count, tail_size, _read_table(stored, width))
    expected = header_size(width) + sum(size for _, size in header.planes) + tail_size
    if stored.size != expected:
        raise CodecError(f"the frame has {stored.size} bytes, its header accounts for {expected}")
    return header


def _read_table(stored: Bytes, width: int) -> tuple[tuple[int, int], ...]:
    table = stored[_HEAD.size : header_size(width)]
    if table.size != width * _PLANE.size:
        raise CodecError(f"the frame has {stored.size} bytes, too few for its table of {width} planes")
    return tuple(_PLANE.iter_unpack(table.data))


def _unpack(body: Bytes, method: int, count: int) -> Bytes:
    if method not in METHODS:
        raise CodecError(f"a plane is stored by method {method}, which does not exist")
    if method == ZSTD:
        return zstd.decompress(body, count)
    if body.size != count:
        raise CodecError(f"a raw plane has {body.size} bytes, not {count}")
    return body
