"""Indexes that an attacker has written, with all digests right: no command takes much more memory than they have bytes."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpointd.cli import program
from checkpointd_client import Checkpointer
from tests.forged_roots import Forger

FREE_BYTES = 16 << 20
"""For modules that a command imports and keeps."""
TIMES_MAX = 40
"""Python's objects take 10 to 30 times the bytes of the shortest entries."""

Raw = dict[str, bytes]


def packed(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def listed(count: int, items: bytes) -> bytes:
    """An array of `count` items that are encoded already."""
    return b"\xdd" + count.to_bytes(4, "big") + items


def empty(fqn: str, dtype: str = "bool") -> list[Any]:
    return [fqn, dtype, [0], [[0], [0]], "rank"]


def no_chunks(count: int) -> Raw:
    """The rest of an index of `count` tensors without elements."""
    return {"chunks": listed(count, b"\x90" * count), "aliases": b"\x90"}


def dictionary(key: str, child: bytes) -> bytes:
    """A tree: a dict with one key."""
    return packed(b"\x93\xa1D\xa4dict\xdd\0\0\0\1\x92" + packed(key) + child)


def many_dimensions(index: dict[str, Any]) -> Raw:
    owner = index["tensors"][0][0]
    numbers = listed(1 << 20, b"\x01" * (1 << 20))
    return {"aliases": b"\x91\x95" + packed("x") + packed(owner) + numbers + numbers + b"\x00"}


def many_offsets(index: dict[str, Any]) -> Raw:
    numbers = listed(1 << 20, b"\x00" * (1 << 20))
    return {"tensors": b"\x91\x95\xa1x\xa4bool\x90\x92" + numbers + numbers + b"\xa4rank", "chunks": b"\x91\x90"}


def many_empty_names(index: dict[str, Any]) -> Raw:
    return {"excluded": listed(2 << 20, b"\xa0" * (2 << 20))}


def many_names(index: dict[str, Any]) -> Raw:
    return {"excluded": listed(12_000, b"".join(packed(f"{n:05x}") for n in range(12_000)))}


def many_aliases(index: dict[str, Any]) -> Raw:
    owner = index["tensors"][0][0]
    return {"aliases": listed(8_000, b"".join(packed([f"{n:x}", owner, [], [], 0]) for n in range(8_000)))}


def many_empty_tensors(index: dict[str, Any]) -> Raw:
    return {"tensors": listed(8_000, b"".join(packed(empty(f"{n:x}")) for n in range(8_000))), **no_chunks(8_000)}


def one_long_name_and_many_short_ones(index: dict[str, Any]) -> Raw:
    tensors = [empty("x" * 100_000), *(empty(f"{n:x}") for n in range(1_000))]
    return {"tensors": packed(tensors), **no_chunks(1_001)}


def one_long_shape_and_many_short_ones(index: dict[str, Any]) -> Raw:
    tensors = [["x", "bool", [0] * 1000, [[0] * 1000] * 2, "rank"], *(empty(f"{n:x}a") for n in range(1_000))]
    return {"tensors": packed(tensors), **no_chunks(1_001)}


def a_long_key_above_many_values(index: dict[str, Any]) -> Raw:
    return {"tree": dictionary("k" * 100_000, b"\x93\xa1L\xa4list" + listed(8_000, packed(["D", "dict", []]) * 8_000))}


def many_pairs_of_none(index: dict[str, Any]) -> Raw:
    return {"tree": packed(b"\x93\xa1D\xa4dict" + listed(20_000, b"\x92\xc0\xc0" * 20_000))}


def many_tensors_in_the_tree(index: dict[str, Any]) -> Raw:
    return {"tree": packed(b"\x93\xa1L\xa4list" + listed(20_000, b"\x92\xa1T\xa0" * 20_000))}


def objects_that_are_not_there(index: dict[str, Any]) -> Raw:
    one = packed({"name": "00000-1.chunks", "size": 1})
    return {"objects": listed(2_000, one * 2_000)}


BOMBS = (
    many_dimensions,
    many_offsets,
    many_empty_names,
    many_names,
    many_aliases,
    many_empty_tensors,
    one_long_name_and_many_short_ones,
    one_long_shape_and_many_short_ones,
    a_long_key_above_many_values,
    many_pairs_of_none,
    many_tensors_in_the_tree,
    objects_that_are_not_there,
)
COMMANDS = (("inspect", "t", "--values"), ("verify", "t"))
"""Those that read the most; the others read an index only to decide, if at all."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bombs") / "root"
    with Checkpointer(root) as ckpt:
        ckpt.save(1, {"model": torch.nn.Linear(4, 4)}, tag="t").wait()
    for command in COMMANDS:  # imports what they need
        ran(root, *command)
    return root


def ran(root: Path, *command: str) -> int:
    with redirect_stdout(io.TextIOWrapper(io.BytesIO())), redirect_stderr(io.StringIO()):
        return program.run([command[0], str(root), *command[1:]])


@contextmanager
def original(forger: Forger) -> Iterator[None]:
    """Puts back what was there."""
    before = {path: path.read_bytes() for path in forger.folder.iterdir()}
    try:
        yield
    finally:
        for path, data in before.items():
            path.write_bytes(data)


def map_of(fields: dict[str, Any], changed: Raw) -> bytes:
    """The fields as a map in msgpack, some of them `changed`."""
    encoded = [packed(name) + changed.get(name, packed(value)) for name, value in fields.items()]
    return bytes([0x80 | len(encoded)]) + b"".join(encoded)


@pytest.mark.nightly
@pytest.mark.parametrize("bomb", BOMBS, ids=lambda bomb: bomb.__name__)
def test_no_command_takes_much_more_memory_than_the_index_has_bytes(saved: Path, bomb: Callable[[dict[str, Any]], Raw]) -> None:
    forger = Forger(saved, "t")
    changed = bomb(forger.index())
    parts = [map_of(msgspec.msgpack.decode(part), changed) for part in forger.parts()]
    data = b"".join(parts)
    with original(forger):
        forger.put_parts(*parts)
        for command in COMMANDS:
            tracemalloc.start(1)
            ran(saved, *command)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < FREE_BYTES + TIMES_MAX * len(data), f"{command[0]} takes {peak >> 20} MiB for {len(data) >> 10} KiB"
