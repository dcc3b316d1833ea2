"""The files of a checkpoint, and the reads of their chunks (`chunks.py`).

Invariant
  STOREDFILE-1  The chunks of a file cover it once, from its first byte to its last (FILE-6 in `files.py`). Otherwise the index
      is damaged.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointd.errors import DamagedError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Index
from checkpointd.pipeline.read.plan import ChunkRead, rank_reads


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
