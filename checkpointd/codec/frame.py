"""The stored bytes of the codec `planes`: a header, then the planes, then the tail (the bytes after the last whole element).

All integers are little-endian; `docs/format/CODECS.md` has the table. Invariants:
- the most significant plane comes first, in the table and in the bodies;
- the bodies and the tail fill the frame exactly: no gap, no trailing byte;
- a frame is never larger than header_size(itemsize) + raw_size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from checkpointd.codec import zstd
from checkpointd.codec.buffers import Bytes
from checkpointd.codec.element import WIDTHS, ElementType
from checkpointd.codec.planes import has_sign, merge_planes, split_plane
from checkpointd.errors import CodecError

VERSION = 1
RAW, ZSTD = 0, 1
METHODS = (RAW, ZSTD)

_HEAD = struct.Struct("<BBBBQ")
_PLANE = struct.Struct("<BQ")

SAMPLE_RUNS, SAMPLE_BYTES = 3, 16 << 10
"""A plane is sampled in this many runs of this many bytes to learn whether zstd is worth its time."""
SAMPLE_RATIO_MAX = 0.95
"""A plane is stored raw, at the cost of a copy, if Huffman coding saves less than a twentieth of its sample."""
REPEATS_RATIO_MAX = 0.2
"""Huffman codes have at least one bit, an eighth of a byte. Only where a sample comes near that can a search for repeats save
more."""


def header_size(itemsize: int) -> int:
    """Bytes before the first plane."""
    return _HEAD.size + itemsize * _PLANE.size


def encode_frame(raw: Bytes, element: ElementType, out: Bytes) -> int:
    """Write the frame of `raw` to `out`, which has at least header_size + raw.size bytes. Returns the frame's size.

    Each plane is split in place in `out`; if zstd shrinks it, its compressed form replaces it there.
    """
    width = element.itemsize
    count = raw.size // width
    elements = raw[: count * width]
    rotation = element.rotation if has_sign(elements, itemsize=width) else 0
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
    compress = _compressor(_sample(plane)) if plane.size else None
    packed = compress(plane) if compress else b""
    if compress is None or len(packed) >= plane.size:
        return RAW, plane.size
    plane[: len(packed)] = np.frombuffer(packed, dtype=np.uint8)
    return ZSTD, len(packed)


def _compressor(taken: Bytes) -> Callable[[Bytes], bytes] | None:
    """How to compress the plane from which the sample was `taken`; None: not at all."""
    packed = len(zstd.huffman(taken))
    if packed > SAMPLE_RATIO_MAX * taken.size:
        return None
    if packed <= REPEATS_RATIO_MAX * taken.size and len(zstd.general(taken)) < packed:
        return zstd.general
    return zstd.huffman


def _sample(plane: Bytes) -> Bytes:
    """Some runs of `plane`, spread evenly; all of it if it is not larger than those."""
    stride = plane.size // SAMPLE_RUNS
    if stride <= SAMPLE_BYTES:
        return plane
    runs = plane[: SAMPLE_RUNS * stride].reshape(SAMPLE_RUNS, stride)[:, :SAMPLE_BYTES]
    return np.frombuffer(runs.tobytes(), dtype=np.uint8)


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
