"""The record of an export, and the order of its files."""

from __future__ import annotations

import pytest

from checkpointd.errors import FormatError
from checkpointd.export.record import decode, encode, in_order
from tests.unit.export.test_planning import checkpoint, record


def test_a_record_reads_as_it_was_written() -> None:
    made = record(checkpoint(3))
    assert decode(encode(made)) == made
    assert made.is_of(checkpoint(3))
    assert not made.is_of(checkpoint(4))


@pytest.mark.parametrize("data", [b"", b"{}", b'{"checkpoint": {}, "digest": "", "metadata": ""}', b"\xff"])
def test_another_file_of_its_name_is_none(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"checkpointd.json is not the record of an export"):
        decode(data)


def test_the_configuration_comes_last_and_the_index_before_it() -> None:
    names = ["config.json", "model.safetensors.index.json", "a.json", "zebra.txt"]
    assert in_order(dict.fromkeys(names, b"")) == ["a.json", "zebra.txt", "model.safetensors.index.json", "config.json"]
