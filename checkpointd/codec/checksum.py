"""The hash functions: XXH3-64 for checksums of stored bytes, XXH3-128 for digests of raw bytes. Neither prevents forgery.

`pipeline/write/encode.py` gives each chunk a digest, and each encoded one a checksum; `pipeline/read/decode.py` checks them.
The functions release the GIL and copy nothing. A buffer that is not C-contiguous raises ValueError.
"""

from __future__ import annotations

import xxhash

from checkpointd.codec.buffers import Buffer, byte_view


def xxh3_64(data: Buffer) -> int:
    """XXH3-64 of the bytes of `data`, seed 0, as an unsigned integer."""
    return xxhash.xxh3_64_intdigest(byte_view(data).data)


def xxh3_128(data: Buffer) -> bytes:
    """XXH3-128 of the bytes of `data`, seed 0: 16 bytes, big-endian (the canonical form)."""
    return xxhash.xxh3_128_digest(byte_view(data).data)


def xxh3_128_hasher() -> xxhash.xxh3_128:
    """A hasher that takes bytes piece by piece, as bytes or C-contiguous memoryviews; its `digest()` is that of `xxh3_128`."""
    return xxhash.xxh3_128()


def xxh3_128_hex(data: Buffer) -> str:
    """XXH3-128 of the bytes of `data`, seed 0: the canonical form as 32 lower-case hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(byte_view(data).data)
