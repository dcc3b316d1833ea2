"""Stored files, and how torch.load reads them: each byte once, into its final memory, and verified there.

Invariants
  VERIFIEDFILE-1  The bytes around the storages, which hold the pickle, are verified before any of them is given out.
  VERIFIEDFILE-2  Damaged bytes are noted and still given out, since torch's reader must not see an exception. The caller must
      throw away the loaded objects if `finish` returns damage.
  VERIFIEDFILE-3  The chunks of a file cover it once, from its first byte to its last (FILE-6 in `files.py`). Otherwise the
      index is damaged.
"""

from __future__ import annotations

import io
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from checkpointd.errors import CheckpointdError, DamagedError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.read.plan import ChunkRead, Place, rank_reads
from checkpointd.pipeline.shard import Bytes

Read = Callable[[Sequence[ChunkRead]], list[DamagedError]]

DIRECT_BYTES = 256 << 10
"""Chunks of at least this size are read straight into the reader's memory; smaller ones are read together, ahead."""
AHEAD_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a rank stored as one object: the reads of its chunks, in order. `around`: the FQN of the bytes around the
    storages.
    """

    name: str
    size: int
    around: str
    parts: tuple[ChunkRead, ...]

    def first_at(self, offset: int) -> int:
        """The number of the part that contains the byte `offset`."""
        return bisect_right(self.parts, offset, key=lambda part: part.chunk.offset) - 1

    @property
    def fqns(self) -> set[str]:
        """The tensors that make up the file."""
        return {part.entry.fqn for part in self.parts}


def stored_files(prefix: str, index: Index) -> list[StoredFile]:
    """The files of one rank of the attempt `prefix`; empty if it stored a state. Raises DamagedError for incomplete files."""
    files = tree.files_of(index.tree, prefix)
    if files is None:
        return []
    by_object: dict[int, list[ChunkRead]] = defaultdict(list)
    for part in rank_reads(prefix, index):
        by_object[part.chunk.object].append(part)
    found = []
    for number, file in enumerate(files.files):
        parts = tuple(sorted(by_object[number], key=lambda part: part.chunk.offset))
        key = parts[0].key if parts else prefix
        if fault := _cover_fault(parts, file.size):
            raise DamagedError(f"the chunks of {file.name} of rank {index.rank} {fault}", key=key, rank=index.rank)
        found.append(StoredFile(file.name, file.size, file.hollow, parts))
    return found


def _cover_fault(parts: Sequence[ChunkRead], size: int) -> str:
    end = 0
    for part in parts:
        chunk = part.chunk
        if chunk.offset != end or (chunk.codec, chunk.raw) != ("raw", chunk.stored):
            return f"do not cover it once: byte {end}"
        end = chunk.end
    return "" if end == size else f"cover {end} of its {size} bytes"


@dataclass(slots=True)
class _Kept:
    """A chunk in our own memory, until all of it was given out; `left` counts the bytes that were not given out yet."""

    data: Bytes
    left: int


class VerifiedFile(io.RawIOBase):
    """`file`, whose chunks `read` reads into their places and verifies."""

    def __init__(self, file: StoredFile, read: Read) -> None:
        super().__init__()
        self.file, self._read = file, read
        self.damage: list[DamagedError] = []
        self.error: CheckpointdError | None = None
        self._at = 0
        self._kept: dict[int, _Kept] = {}
        self._unread = {part.chunk.offset: part for part in file.parts}
        self._take([self._own(part) for part in file.parts if part.entry.fqn == file.around])

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.file.size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        """Fill `out` from the current position and return the number of bytes; 0 if the storage fails (`error`)."""
        view = memoryview(out).cast("B")
        view = view[: max(0, min(len(view), self.file.size - self._at))]
        if not len(view):
            return 0
        try:
            self._fill(np.frombuffer(view, dtype=np.uint8))
        except CheckpointdError as error:
            self.error = error
            return 0
        self._at += len(view)
        return len(view)

    def finish(self) -> list[DamagedError]:
        """Verify also the chunks that were not asked for; returns all damage. Raises the error if reading failed."""
        if self.error is not None:
            raise self.error
        self._kept.clear()
        self._take([*self._unread.values()])
        return self.damage

    def _fill(self, out: Bytes) -> None:
        start, stop = self._at, self._at + out.size
        asked, wanted = self._asked(start, stop), list[ChunkRead]()
        for part in asked:
            chunk = part.chunk
            if chunk.offset in self._kept:
                continue
            if chunk.raw < DIRECT_BYTES:
                wanted += [self._own(one) for one in self._ahead(part)]
            elif start <= chunk.offset and chunk.end <= stop:
                wanted.append(replace(part, place=Place(out, chunk.offset - start, chunk.raw)))
            else:
                wanted.append(self._own(part))
        self._take(wanted)
        for part in asked:
            chunk, kept = part.chunk, self._kept.get(part.chunk.offset)
            if kept is not None:
                low, high = max(start, chunk.offset), min(stop, chunk.end)
                out[low - start : high - start] = kept.data[low - chunk.offset : high - chunk.offset]
                kept.left -= high - low
                if kept.left <= 0 and part.entry.fqn != self.file.around:
                    del self._kept[chunk.offset]

    def _asked(self, start: int, stop: int) -> list[ChunkRead]:
        parts, number = self.file.parts, self.file.first_at(start)
        found = []
        while number < len(parts) and parts[number].chunk.offset < stop:
            found.append(parts[number])
            number += 1
        return found

    def _ahead(self, first: ChunkRead) -> Iterator[ChunkRead]:
        """`first`, and the unread small chunks behind it."""
        yield first
        start = first.chunk.offset
        for part in self._asked(first.chunk.end, start + AHEAD_BYTES):
            offset = part.chunk.offset
            is_near = start < offset and part.chunk.end - start <= AHEAD_BYTES and part.chunk.raw < DIRECT_BYTES
            if is_near and offset in self._unread and offset not in self._kept:
                yield part

    def _own(self, part: ChunkRead) -> ChunkRead:
        """The read of `part` into our own memory."""
        data = np.empty(part.chunk.raw, dtype=np.uint8)
        self._kept[part.chunk.offset] = _Kept(data, part.chunk.raw)
        return replace(part, place=Place(data, 0, part.chunk.raw))

    def _take(self, wanted: Sequence[ChunkRead]) -> None:
        if wanted:
            self.damage += self._read(wanted)
            for part in wanted:
                self._unread.pop(part.chunk.offset, None)
