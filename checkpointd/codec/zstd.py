"""One zstd frame <-> bytes of a known size, in bounded memory.

Compressor objects are not thread-safe and take only microseconds to make, so each call makes its own. To make a decompressor
takes longer than to decompress a small frame, so one is used again, by one thread at a time. Two bindings of one library are in
use, because each lacks something. `zstandard` decompresses into memory of exactly the content's size. Only Python's own binding
(`backports.zstd` before Python 3.14) sets the parameter that `huffman` needs.
"""

from __future__ import annotations

import sys

import numpy as np
import zstandard

from checkpointd.codec.buffers import Bytes
from checkpointd.errors import CodecError

if sys.version_info >= (3, 14):
    from compression.zstd import CompressionParameter, ZstdCompressor
else:
    from backports.zstd import CompressionParameter, ZstdCompressor

_LITERAL_COMPRESSION_MODE, _ENABLED = 1002, 1
"""ZSTD_c_literalCompressionMode of zstd.h, by its number, since the binding has no name for it."""

_GENERAL = zstandard.ZstdCompressionParameters.from_level(1)
_HUFFMAN: dict[int, int] = {
    CompressionParameter.compression_level: -400,
    CompressionParameter.min_match: 7,
    CompressionParameter.window_log: 17,
    CompressionParameter.hash_log: 6,
    CompressionParameter.chain_log: 6,
    _LITERAL_COMPRESSION_MODE: _ENABLED,
}
"""A very negative level hardly looks for matches. By itself it would also leave out Huffman coding, which does the work here.
The small window and tables keep a compressor's memory in the processor's cache."""

WINDOW_MAX = 8 << 20
"""The largest window in bytes that a reader must accept. This reader accepts no larger one (RFC 8878 recommends the same)."""

_SPARE: list[zstandard.ZstdDecompressor] = []
"""The decompressors that no thread uses now."""

_MAGIC = b"\x28\xb5\x2f\xfd"


def general(data: Bytes) -> bytes:
    """`data`, at least one byte, as one frame that carries its content size and no checksum. It looks for repeats."""
    return zstandard.ZstdCompressor(compression_params=_GENERAL).compress(data.data)


def huffman(data: Bytes) -> bytes:
    """The same for byte planes: Huffman coding alone, but for long repeats.

    On exponents it is three times as fast as `general`, and its frames are smaller, because short matches disturb the
    statistics of the literals.
    """
    compressor = ZstdCompressor(options=_HUFFMAN)
    compressor.set_pledged_input_size(data.size)
    return compressor.compress(data.data, ZstdCompressor.FLUSH_FRAME)


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
    try:
        decompressor = _SPARE.pop()
    except IndexError:
        decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_MAX)
    try:
        # Gives exactly the content size that the header declares, or raises.
        content = decompressor.decompress(frame.data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CodecError(f"the zstd frame is damaged: {error}") from error
    finally:
        _SPARE.append(decompressor)
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
