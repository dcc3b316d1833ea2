"""PURE: chunk bytes <-> stored bytes. `docs/format/CODECS.md` describes the stored bytes for other languages.

Every function depends on its arguments alone, keeps nothing between calls, and may run in many threads at once. The slow parts
(numpy, zstd, xxh3) release the GIL.
"""

from __future__ import annotations

from checkpointd.codec.buffers import Buffer
from checkpointd.codec.choose import Compression, Estimate, choose, planes_ratio, sample
from checkpointd.codec.chunk import CODECS, Codec, decode, encode, stored_size_max
from checkpointd.codec.delta import decode_delta, difference
from checkpointd.codec.element import ElementType, Kind

__all__ = [
    "CODECS",
    "Buffer",
    "Codec",
    "Compression",
    "ElementType",
    "Estimate",
    "Kind",
    "choose",
    "decode",
    "decode_delta",
    "difference",
    "encode",
    "planes_ratio",
    "sample",
    "stored_size_max",
]
