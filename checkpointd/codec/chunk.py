"""Encodes or decodes one chunk with one codec: the only two calls that the pipelines need.

`choose` names the codec of a tensor, and `encode` uses it even if the result is not smaller. The caller compares the sizes,
stores the raw bytes if encoding did not shrink them, and records the codec in the index.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from checkpointd.codec import zstd
from checkpointd.codec.buffers import Buffer, Bytes, byte_view, writable_view
from checkpointd.codec.element import ElementType, Kind
from checkpointd.codec.frame import decode_frame, encode_frame
from checkpointd.errors import CodecError

Codec: TypeAlias = Literal["raw", "zstd", "planes"]
"""The codec of one chunk, as the index names it."""

CODECS: tuple[Codec, ...] = ("raw", "zstd", "planes")


def stored_size_max(raw_size: int) -> int:
    """The largest stored size of `raw_size` raw bytes, by any codec. `encode` needs an `out` of this size."""
    # zstd's own bound is n + n/256 + 64; a planes frame adds a header of at most 84 bytes.
    return raw_size + (raw_size >> 8) + 128


def encode(data: Buffer, *, codec: str, itemsize: int, kind: str, out: memoryview | NDArray[Any] | None = None) -> memoryview:
    """The stored bytes of `data`, which may have any length, also a part of an element.

    Without `out`, `raw` returns a view of `data` itself, and the other codecs return new memory. With `out`, the result is the
    written part of `out`, which must have at least `stored_size_max(size of data)` bytes and must not overlap `data`. Every
    codec stores empty data as no bytes. The result may be larger than `data`: the caller then stores `data` as `raw`.

    Raises:
        ValueError: unknown codec, itemsize or kind; data or out not C-contiguous; out read-only or too small.
    """
    element = ElementType(itemsize, cast(Kind, kind))
    raw = byte_view(data)
    target = None if out is None else writable_view(out, stored_size_max(raw.size))
    if codec == "raw" or (raw.size == 0 and codec in CODECS):
        return _placed(raw, target)
    if codec == "zstd":
        return _placed(np.frombuffer(zstd.general(raw), dtype=np.uint8), target)
    if codec == "planes":
        target = np.empty(stored_size_max(raw.size), dtype=np.uint8) if target is None else target
        return target[: encode_frame(raw, element, target)].data
    raise ValueError(f"codec is {codec!r}, not one of {', '.join(CODECS)}")


def _placed(stored: Bytes, target: Bytes | None) -> memoryview:
    if target is None:
        return stored.data
    target[: stored.size] = stored
    return target[: stored.size].data


def decode(stored: Buffer, *, codec: str, raw_size: int, out: memoryview | NDArray[Any]) -> None:
    """Write the `raw_size` raw bytes of `stored` to the start of `out`, and leave the rest of `out` alone.

    `stored` may be hostile: beside `out`, at most raw_size + 16 MiB is allocated, and `out` is written only after all of
    `stored` was checked. `out` and `stored` must not overlap.

    Raises:
        CodecError: `stored` does not decode to exactly raw_size bytes, or the codec is unknown.
        ValueError: `out` is read-only, not C-contiguous or smaller than raw_size; raw_size is negative.
    """
    if raw_size < 0:
        raise ValueError(f"raw_size is {raw_size}")
    source, target = byte_view(stored), writable_view(out, raw_size)[:raw_size]
    if codec not in CODECS:
        raise CodecError(f"the codec {codec!r} is unknown: a newer version may have written it")
    if raw_size == 0 or codec == "raw":
        _decode_raw(source, target)
    elif codec == "zstd":
        np.copyto(target, zstd.decompress(source, raw_size))
    else:
        decode_frame(source, target)


def _decode_raw(source: Bytes, target: Bytes) -> None:
    if source.size != target.size:
        raise CodecError(f"{source.size} bytes are stored, not {target.size}")
    np.copyto(target, source)
