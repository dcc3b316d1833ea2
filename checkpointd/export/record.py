"""The record of an export: `checkpointd.json` beside its files, which describes them. Other programs ignore it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from checkpointd.commit.facts import Order
from checkpointd.errors import FormatError
from checkpointd.export.safetensors import INDEX
from checkpointd.layout.log_records import LoggedAttempt

NAME = "checkpointd.json"
CONFIG = "config.json"
"""Hugging Face's libraries read it first, so a directory without it cannot be loaded."""
RECORD_BYTES_MAX = 16 << 20


class ExportRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="format", tag="checkpointd.export"):
    """The files of an export, and the checkpoint from which they were made.

    `ballot`: the digest of the checkpoint's ballot, which no other checkpoint has. `complete`: whether all files exist; in a
    bucket, the record is first written without it. `files`: the names of all files except this record.
    """

    version: Literal[1] = 1
    complete: bool
    root: str
    tag: str
    attempt: str
    order: Order
    ballot: str
    step: int
    only: str | None
    dtype: str
    bytes: int
    """The bytes of the tensors."""
    files: tuple[str, ...]
    release: str
    time: str
    """When the export began: ISO 8601, UTC."""

    def is_of(self, checkpoint: LoggedAttempt) -> bool:
        """Whether this is an export of `checkpoint`."""
        return (self.tag, self.attempt, self.ballot) == (checkpoint.tag, str(checkpoint.id), ballot_of(checkpoint))


def ballot_of(checkpoint: LoggedAttempt) -> str:
    """The digest of the ballot of `checkpoint`."""
    return checkpoint.commit.ballot.digest


def encode(record: ExportRecord) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def decode(data: bytes) -> ExportRecord:
    """FormatError if `data` is no record, as the file of the same name of an export for DCP."""
    try:
        return msgspec.json.decode(data, type=ExportRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{NAME} is not the record of an export: {error}") from error


def in_order(files: Mapping[str, bytes]) -> list[str]:
    """The names of `files` in the order in which they are put where each appears by itself: those by which programs find the
    others come last.
    """
    last = (INDEX, CONFIG)
    return sorted(files, key=lambda name: (last.index(name) if name in last else -1, name))
