"""One zstd frame <-> bytes of a known size, in bounded memory.

Compressor objects are not thread-safe and take only 8 microseconds to make, so each call makes its own.
"""

from __future__ import annotations

import numpy as np
import zstandard

from checkpointd.codec.buffers import Bytes
from checkpointd.errors import CodecError

GENERAL = zstandard.ZstdCompressionParameters.from_level(1)
"""For any bytes: it looks for repeats."""

ENTROPY = zstandard.ZstdCompressionParameters.from_level(
    1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, window_log=17
)
"""For byte planes. With such small tables zstd finds hardly any matches, and Huffman coding does the work. On exponents it is
2.5 times as fast as GENERAL and gives smaller results, because short matches disturb the statistics of the literals."""

WINDOW_MAX = 8 << 20
"""The largest window in bytes that a reader must accept. This reader accepts no larger one (RFC 8878 recommends the same)."""

_MAGIC = b"\x28\xb5\x2f\xfd"


def compress(data: Bytes, params: zstandard.ZstdCompressionParameters) -> bytes:
    """`data`, at least one byte, as one frame that carries its content size and no checksum."""
    return zstandard.ZstdCompressor(compression_params=params).compress(data.data)


def decompress(frame: Bytes, raw_size: int) -> Bytes:
    """The content of `frame`, which must be exactly one frame of exactly `raw_size` bytes. The result is read-only.

    The sizes in the frame's header are checked first, so at most raw_size + WINDOW_MAX bytes and a small constant are
    allocated. For raw_size 0, `frame` must be empty.

    Raises:
        CodecError: `frame` is anything else.
    """
    if raw_size == 0:
        if frame.size:
            raise CodecError(f"{frame.size} bytes are stored where there should be none")
        return frame
    _check_header(frame, raw_size)
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_MAX)
    try:
        # Gives exactly the content size that the header declares, or raises.
        content = decompressor.decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"the zstd frame is damaged: {error}") from error
    return np.frombuffer(content, dtype=np.uint8)


def _check_header(frame: Bytes, raw_size: int) -> None:
    if frame[:4].tobytes() != _MAGIC:
        raise CodecError("no zstd frame begins here")
    try:
        header = zstandard.get_frame_parameters(frame.data)
    except zstandard.ZstdError as error:
        raise CodecError(f"the zstd frame's header is damaged: {error}") from error
    if header.content_size != raw_size:
        raise CodecError(f"the zstd frame declares {header.content_size} bytes, not {raw_size}")
    if header.window_size > WINDOW_MAX:
        raise CodecError(f"the zstd frame asks for a window of {header.window_size} bytes, more than {WINDOW_MAX}")
    if header.dict_id:
        raise CodecError(f"the zstd frame asks for dictionary {header.dict_id}; there are none")
