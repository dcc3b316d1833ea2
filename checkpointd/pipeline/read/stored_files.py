"""Reads the files of a checkpoint in parts, and verifies each part by its digest.

Invariants
  STOREDFILE-1  The chunks of a file cover it once, from its first byte to its last (FILE-6 in `files.py`). Otherwise the index
      is damaged.
  STOREDFILE-2  Memory that `read_runs` has filled is whole, unless `read_runs` returns damage for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from checkpointd.codec.checksum import xxh3_128
from checkpointd.config import LoadConfig
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout import tree
from checkpointd.layout.indexes import Chunk, Index
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class FileChunk:
    """Bytes `[start, stop)` of a file, which are one chunk of the tensor `fqn`."""

    start: int
    stop: int
    fqn: str
    chunk: Chunk

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that `rank` stored as the object `key`. `around`: the FQN of the bytes around the storages."""

    name: str
    key: str
    rank: int
    size: int
    around: str
    parts: tuple[FileChunk, ...]

    def first_at(self, offset: int) -> int:
        """The number of the part that contains the byte `offset`."""
        return bisect_right(self.parts, offset, key=lambda part: part.start) - 1

    @property
    def fqns(self) -> set[str]:
        """The tensors that make up the file."""
        return {part.fqn for part in self.parts}


@dataclass(frozen=True, slots=True)
class FileChunkRun:
    """Neighbouring parts of a file, and the memory into which they are read."""

    parts: Sequence[FileChunk]
    into: memoryview


def stored_files(prefix: str, index: Index) -> list[StoredFile]:
    """The files of one rank of the attempt `prefix`; empty if it stored a state. Raises DamagedError for incomplete files."""
    files = tree.files_of(index.tree, prefix)
    if files is None:
        return []
    by_object: dict[int, list[FileChunk]] = defaultdict(list)
    for entry in index.tensors:
        for chunk in entry.chunks:
            by_object[chunk.object].append(FileChunk(chunk.offset, chunk.end, entry.fqn, chunk))
    found = []
    for number, file in enumerate(files.files):
        key = index.objects[number].key(prefix) if number < len(index.objects) else prefix
        parts = tuple(sorted(by_object[number], key=lambda part: part.start))
        _check_cover(parts, file.size, f"{file.name} of rank {index.rank}", key, index.rank)
        found.append(StoredFile(file.name, key, index.rank, file.size, file.hollow, parts))
    return found


def _check_cover(parts: Sequence[FileChunk], size: int, what: str, key: str, rank: int) -> None:
    end = 0
    for part in parts:
        if part.start != end or (part.chunk.codec, part.chunk.raw) != ("raw", part.nbytes):
            raise DamagedError(f"the chunks of {what} do not cover it once: byte {end}", key=key, rank=rank)
        end = part.stop
    if end != size:
        raise DamagedError(f"the chunks of {what} cover {end} of its {size} bytes", key=key, rank=rank)


async def read_runs(
    store: Store,
    file: StoredFile,
    runs: Sequence[FileChunkRun],
    config: LoadConfig,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[DamagedError]:
    """Fill the memory of `runs` of `file`, and verify every part. Returns the damage. Raises UnreadableError as the store does.

    A missing object counts as damage, so use a store that raises NotFoundError only if that is proved (`store/patient.py`).
    """
    damage: list[list[DamagedError]] = [[] for _ in runs]

    async def read(run: FileChunkRun, found: list[DamagedError]) -> None:
        try:
            faults = await store.get_parts(file.key, run.parts[0].start, [run.into], lambda: list(_faults(file, run)))
        except (NotFoundError, DamagedError) as error:
            found.append(DamagedError(f"{error} (rank {file.rank}, {file.name})", key=file.key, rank=file.rank))
            return
        found += faults
        on_bytes(len(run.into))

    await run_workers([partial(read, *pair) for pair in zip(runs, damage, strict=True)], config.reads)
    return [error for found in damage for error in found]


def _faults(file: StoredFile, run: FileChunkRun) -> Iterator[DamagedError]:
    first = run.parts[0].start
    for part in run.parts:
        if xxh3_128(run.into[part.start - first : part.stop - first]) != part.chunk.digest:
            yield DamagedError(
                f"{file.key} is damaged at byte {part.start}: the digest of {part.nbytes} bytes does not match "
                f"(rank {file.rank}, {file.name})",
                key=file.key,
                fqn=part.fqn,
                rank=file.rank,
            )
