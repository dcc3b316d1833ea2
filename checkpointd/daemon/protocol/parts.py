"""Cuts long messages into parts that take little time to make and to decode (WIRE-4). Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from checkpointd.daemon.protocol.wire import Contents, Layout, Report, Snapshot, WireTensor
from checkpointd.layout.indexes import Alias

PART_BYTES = 24 << 10
"""The size of one part, about."""

T = TypeVar("T")


def layout_parts(layout: int, nbytes: int, tensors: tuple[WireTensor, ...]) -> Iterator[Layout]:
    """The parts of a layout."""
    parts = list(_runs(tensors, _tensor_bytes)) or [()]
    for part in parts:
        yield Layout(layout=layout, nbytes=nbytes, tensors=part, more=part is not parts[-1])


def contents_parts(save: int, aliases: tuple[Alias, ...], excluded: tuple[str, ...], tree: bytes) -> Iterator[Contents]:
    """The parts of a snapshot's data beside its tensors, to send before Announced."""
    yield from (Contents(save=save, aliases=part) for part in _runs(aliases, _alias_bytes))
    yield from (Contents(save=save, excluded=part) for part in _runs(excluded, _text_bytes))
    yield from (Contents(save=save, tree=part) for part in _pieces(tree))


def snapshot_parts(whole: Snapshot) -> Iterator[Snapshot]:
    """The parts of a snapshot that is given back. Send the descriptor with the first."""
    digests, at = whole.digests, 0
    empty = Snapshot(held=whole.held, nbytes=whole.nbytes, more=True)
    for tensors in _runs(whole.tensors, _tensor_bytes):
        yield msgspec.structs.replace(empty, tensors=tensors, digests=digests[at : at + len(tensors)])
        at += len(tensors)
    yield from (msgspec.structs.replace(empty, aliases=part) for part in _runs(whole.aliases, _alias_bytes))
    yield from (msgspec.structs.replace(empty, excluded=part) for part in _runs(whole.excluded, _text_bytes))
    yield from (msgspec.structs.replace(empty, tree=part) for part in _pieces(whole.tree))
    yield msgspec.structs.replace(empty, more=False)


def snapshot_of(parts: Iterable[Snapshot]) -> Snapshot:
    """The snapshot that came in `parts`."""
    found = list(parts)
    return msgspec.structs.replace(
        found[0],
        tensors=tuple(t for part in found for t in part.tensors),
        aliases=tuple(a for part in found for a in part.aliases),
        excluded=tuple(e for part in found for e in part.excluded),
        tree=b"".join(part.tree for part in found),
        digests=tuple(d for part in found for d in part.digests),
        more=False,
    )


def report_parts(status: str) -> Iterator[Report]:
    """The parts of a status. A character takes at most 4 bytes."""
    step = PART_BYTES // 4
    for at in range(0, max(len(status), 1), step):
        yield Report(status=status[at : at + step], more=at + step < len(status))


def _runs(items: tuple[T, ...], nbytes: Callable[[T], int]) -> Iterator[tuple[T, ...]]:
    """`items` in runs of about PART_BYTES."""
    start = size = 0
    for at, item in enumerate(items):
        size += nbytes(item)
        if size >= PART_BYTES:
            yield items[start : at + 1]
            start, size = at + 1, 0
    if start < len(items):
        yield items[start:]


def _pieces(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PART_BYTES] for at in range(0, len(data), PART_BYTES))


def _text_bytes(text: str) -> int:
    return 4 * len(text) + 8


def _tensor_bytes(tensor: WireTensor) -> int:
    return _text_bytes(tensor.fqn) + 27 * len(tensor.shape) + 64


def _alias_bytes(alias: Alias) -> int:
    return _text_bytes(alias.fqn) + _text_bytes(alias.owner) + 18 * len(alias.shape) + 32
