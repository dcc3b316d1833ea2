"""The pieces of an object that an index names, each with the digest or checksum of its stored bytes, checked as they pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import xxhash

from checkpointd.errors import DamagedError
from checkpointd.layout.indexes import Chunk, Index

GAP_BYTES_MAX = 64 << 10
"""Pieces at most this far apart are read together."""


@dataclass(frozen=True, slots=True, order=True)
class StoredPiece:
    """The stored bytes `[start, stop)` of an object. A chunk that is stored raw has a digest of them, any other a checksum."""

    start: int
    stop: int
    digest: bytes
    """XXH3-128 if it has 16 bytes, XXH3-64 if it has 8; both in canonical order."""


def pieces_by_object(index: Index) -> list[tuple[StoredPiece, ...]]:
    """The pieces that `index` names, those of the bases of deltas included, for each of its objects, in order."""
    found: list[set[StoredPiece]] = [set() for _ in index.objects]
    for entry in index.tensors:
        for chunk in entry.chunks:
            found[chunk.object].add(_piece(chunk))
            if chunk.base is not None:
                found[chunk.base.object].add(_piece(chunk.full))
    return [tuple(sorted(pieces)) for pieces in found]


def _piece(chunk: Chunk) -> StoredPiece:
    digest = chunk.digest if chunk.checksum is None else chunk.checksum.to_bytes(8, "big")
    return StoredPiece(chunk.offset, chunk.end, digest)


class PassingCheck:
    """Compares `pieces` of the object `key` with the bytes that pass, which must come in order. Holds no bytes."""

    def __init__(self, key: str, pieces: Sequence[StoredPiece]) -> None:
        self._key, self._pieces = key, pieces
        self._next = 0
        self._hash: xxhash.xxh3_64 | xxhash.xxh3_128 | None = None

    def take(self, start: int, data: memoryview) -> None:
        """The bytes `data` of the object from `start` on. Raises DamagedError at the first piece that is wrong."""
        stop = start + data.nbytes
        while self._next < len(self._pieces) and self._pieces[self._next].start < stop:
            piece = self._pieces[self._next]
            if self._hash is None:
                self._hash = xxhash.xxh3_128() if len(piece.digest) == 16 else xxhash.xxh3_64()
            self._hash.update(data[max(piece.start - start, 0) : min(piece.stop, stop) - start])
            if piece.stop > stop:
                return
            if self._hash.digest() != piece.digest:
                raise DamagedError(f"{self._key} is damaged at byte {piece.start}: its digest does not match", key=self._key)
            self._hash, self._next = None, self._next + 1

    @property
    def is_done(self) -> bool:
        """Whether every piece has passed."""
        return self._next == len(self._pieces)


def spans(pieces: Iterable[StoredPiece]) -> Iterator[tuple[int, int, list[StoredPiece]]]:
    """Runs of near pieces: (start, stop, pieces), so that a reader of `pieces` leaves out what lies far between them."""
    run: list[StoredPiece] = []
    for piece in pieces:
        if run and piece.start - run[-1].stop > GAP_BYTES_MAX:
            yield run[0].start, run[-1].stop, run
            run = []
        run.append(piece)
    if run:
        yield run[0].start, run[-1].stop, run
