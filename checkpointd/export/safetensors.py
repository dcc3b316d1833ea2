"""The safetensors format: dtype names, the header, and how Hugging Face splits a model over files.

A file is eight bytes (the length of the header, little-endian), the header (JSON), and the tensors' bytes, back to back and in
the order of their offsets (https://github.com/huggingface/safetensors#format). The header is known before a tensor is read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from checkpointd.layout.dtypes import ITEM_BYTES

DTYPES: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "complex64": "C64",
}
"""Torch's names -> the names of the format, for the dtypes that its libraries read."""

HEADER_BYTES_MAX = 100_000_000
"""Readers refuse a longer header."""

SINGLE, SHARD, INDEX = "model.safetensors", "model-{number:05d}-of-{count:05d}.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of a file: its name in the file, torch's name of its dtype, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: the bytes before the tensors, the place in the file at which each tensor begins, and the file's size."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    size: int


class Unsupported(ValueError):
    """The format cannot hold a tensor; the message names it."""


def split(items: Sequence[Item], file_bytes_max: int | None) -> list[list[Item]]:
    """`items` split over files in order, each with at most `file_bytes_max` bytes; a larger tensor gets its own file."""
    files: list[list[Item]] = [[]]
    used = 0
    for item in items:
        if file_bytes_max is not None and files[-1] and used + item.nbytes > file_bytes_max:
            files.append([])
            used = 0
        files[-1].append(item)
        used += item.nbytes
    return files


def file_names(count: int) -> list[str]:
    """Hugging Face's names for the files of a model that is split over `count` files."""
    return [SINGLE] if count == 1 else [SHARD.format(number=number, count=count) for number in range(1, count + 1)]


def plan_file(name: str, items: Sequence[Item], metadata: Mapping[str, str]) -> FilePlan:
    """Lay out one file. Raises Unsupported if readers do not accept a name, a dtype or the header's length."""
    # Wide elements come first: the header's length is a multiple of eight, so each tensor begins at a multiple of its item
    # size.
    placed = sorted(items, key=lambda item: -ITEM_BYTES[item.dtype])
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offsets, at = {}, 0
    for item in placed:
        if item.name in entries:
            raise Unsupported(f"{item.name!r} cannot be the name of a tensor of {name}: the name is taken already")
        if item.dtype not in DTYPES:
            raise Unsupported(f"{item.name} has the dtype {item.dtype}, which safetensors does not have")
        offsets[item.name], end = at, at + item.nbytes
        entries[item.name] = {"dtype": DTYPES[item.dtype], "shape": item.shape, "data_offsets": (at, end)}
        at = end
    header = _framed(msgspec.json.encode(entries), name)
    return FilePlan(name, header, {key: len(header) + offset for key, offset in offsets.items()}, len(header) + at)


def _framed(text: bytes, name: str) -> bytes:
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise Unsupported(
            f"the header of {name} would have {len(text)} bytes, and {HEADER_BYTES_MAX} are the limit: make smaller files"
        )
    return len(text).to_bytes(8, "little") + text


def index_json(files: Iterable[tuple[str, Sequence[Item]]]) -> bytes:
    """`model.safetensors.index.json` of a model that is split over `files`: it maps each tensor to its file."""
    placed = [(item, name) for name, items in files for item in items]
    weight_map = {item.name: name for item, name in sorted(placed, key=lambda pair: pair[0].name)}
    index = {"metadata": {"total_size": sum(item.nbytes for item, _ in placed)}, "weight_map": weight_map}
    return msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"
