"""The stored bytes against `docs/format/CODECS.md`: a reader written from that page alone, and the golden files."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from checkpointd.codec import decode, encode

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "codec"
STORED = sorted(path for path in GOLDEN.iterdir() if path.suffix in (".planes", ".zstd"))


def read_planes(stored: bytes) -> bytes:
    """The page's reader: slow, and free of everything that the codec itself is made of."""
    if not stored:
        return b""
    version, width, rotation, reserved, raw_size = struct.unpack_from("<BBBBQ", stored)
    assert (version, reserved) == (1, 0)
    count, bits = raw_size // width, 8 * width
    position, planes = 12 + 9 * width, {}
    for entry in range(width):
        method, size = struct.unpack_from("<BQ", stored, 12 + 9 * entry)
        body = stored[position : position + size]
        planes[width - 1 - entry] = zstandard.decompress(body) if method == 1 and count else body
        position += size
    words = (sum(planes[i][k] << 8 * i for i in range(width)) for k in range(count))
    turned = (r >> 1 | (r & 1) << bits - 1 if rotation else r for r in words)
    return b"".join(word.to_bytes(width, "little") for word in turned) + stored[position:]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["float", "other"])
@given(raw=st.binary(max_size=80) | st.binary(max_size=9).map(lambda run: run * 30))
def test_a_reader_made_from_the_page_reads_what_is_written(width: int, kind: str, raw: bytes) -> None:
    assert read_planes(bytes(encode(raw, codec="planes", itemsize=width, kind=kind))) == raw


def test_golden_files_are_there() -> None:
    assert len(STORED) >= 14


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_golden_chunks_of_version_1_still_decode(path: Path) -> None:
    raw, stored = path.with_suffix(".raw").read_bytes(), path.read_bytes()
    out = bytearray(len(raw))
    decode(stored, codec=path.suffix[1:], raw_size=len(raw), out=memoryview(out))
    assert bytes(out) == raw
    if path.suffix == ".planes":
        assert read_planes(stored) == raw


def test_the_example_of_the_page_is_the_golden_one() -> None:
    page = (ROOT / "docs" / "format" / "CODECS.md").read_text()
    block = page.split("### Example")[1].split("```text\n")[1].split("```")[0]
    example = bytes.fromhex("".join(line[:32] for line in block.splitlines()))
    assert example == (GOLDEN / "example-of-the-format-page.planes").read_bytes()


def test_the_writer_writes_the_example_of_the_page() -> None:
    raw = struct.pack("<ff", 1.0, -2.0) + b"\xaa"
    stored = encode(raw, codec="planes", itemsize=4, kind="float")
    assert bytes(stored) == (GOLDEN / "example-of-the-format-page.planes").read_bytes()
