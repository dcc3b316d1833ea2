"""The file `checkpointd.json` of an exported DCP directory: step, metrics and client state. DCP ignores it.

It contains the digest of the `.metadata` beside it: once dcp.save has written to the directory again, the file is ignored.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

import msgspec

from checkpointd.errors import FormatError
from checkpointd.layout import tree
from checkpointd.layout.manifest import digest
from checkpointd_client.integrations.conversion import metadata_file
from checkpointd_client.integrations.conversion.objects import holds_tensors

log = logging.getLogger("checkpointd")

NAME = "checkpointd.json"


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`client_state` is a state tree (`layout/tree.py`) of plain values."""

    version: Literal[1] = 1
    step: int
    metrics: dict[str, float] = {}
    client_state: bytes = b""

    def client_items(self) -> tuple[tuple[tree.Node, tree.Node], ...]:
        """The items of the client state. FormatError if it is not a dict, or holds tensors, which are not in the directory."""
        node = tree.decode(self.client_state) if self.client_state else tree.Dict("dict", ())
        if not isinstance(node, tree.Dict) or holds_tensors(node):
            raise FormatError(f"the client_state in {NAME} is not a dict of plain values")
        return node.items


class _File(msgspec.Struct, frozen=True, kw_only=True):
    """`digest` is the digest of the raw bytes of `checkpoint`."""

    checkpoint: msgspec.Raw
    digest: str
    metadata: str
    """The digest of the `.metadata` that it belongs to."""


def encode(about: About, metadata: bytes) -> bytes:
    """The file for the directory whose `.metadata` holds `metadata`."""
    raw = msgspec.json.encode(about)
    return msgspec.json.encode(_File(checkpoint=msgspec.Raw(raw), digest=digest(raw), metadata=digest(metadata)))


def read(directory: Path) -> About | None:
    """Read the file of `directory`; None if there is none, as after dcp.save. FormatError if it is damaged."""
    path = directory / NAME
    data = metadata_file.content_of(path)
    if data is None:
        return None
    try:
        file = msgspec.json.decode(data, type=_File)
        if digest(file.checkpoint) != file.digest:
            raise FormatError("its bytes are not those that were written")
        about = msgspec.json.decode(file.checkpoint, type=About)
        about.client_items()
    except (msgspec.DecodeError, FormatError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            f"{path} is damaged: {error}. It holds the step, the metrics and the client_state of the checkpoint: restore it, "
            "or remove it and pass the step",
            key=str(path),
        ) from error
    if file.metadata != digest((directory / metadata_file.NAME).read_bytes()):
        log.warning("%s is ignored: it describes an earlier checkpoint, and the directory was saved to again", path)
        return None
    return about
