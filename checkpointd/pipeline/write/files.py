"""Persists a shard of files: each file becomes one object, byte for byte.

Invariants
  FILE-3  When `write_files` returns, every file is durable and complete, and its chunks have checksums and digests.
  FILE-4  When it returns or raises, no thread reads the buffer any more.
  FILE-5  Memory beside the buffer stays below `budget_bytes`, with one block for each write.
  FILE-6  Every byte of every file belongs to exactly one chunk of the index, so verifying the chunks verifies the files.
"""

from __future__ import annotations

import asyncio
import struct
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest

import numpy as np
from zlib_ng import zlib_ng

from checkpointd.errors import FormatError
from checkpointd.layout.files import SUM_BYTES, FilePiece, check_files, pieces_of
from checkpointd.layout.indexes import Chunk, Index
from checkpointd.layout.keys import file_name
from checkpointd.layout.manifest import ObjectRef
from checkpointd.layout.tree import FilesNode, StoredFileNode
from checkpointd.pipeline.pages import page_buffer, page_up, up_to
from checkpointd.pipeline.shard import Bytes, Share
from checkpointd.pipeline.workers import run_workers
from checkpointd.pipeline.write.build_index import index_of
from checkpointd.pipeline.write.encode import Encoded
from checkpointd.pipeline.write.job import PersistJob
from checkpointd.pipeline.write.split import grouped
from checkpointd.pipeline.write.write_objects import discarded_on_error
from checkpointd.store.base import ObjectWriter

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The bytes of one chunk: `nbytes` bytes of a file from its byte `start` on, which lie in one piece."""

    piece: FilePiece
    start: int
    nbytes: int


@dataclass(slots=True)
class FileProgress:
    """One file, with the sums and chunks found so far. `hashed` is set when every sum is known, or when hashing has failed."""

    file: StoredFileNode
    number: int
    pieces: list[FilePiece]
    buffer: Bytes
    places: dict[str, int]
    """Where each tensor begins in the buffer."""
    sums: dict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    """The size and the CRC-32 of each part, by placeholder and by the part's first byte."""
    chunks: dict[str, dict[int, Chunk]] = field(default_factory=lambda: defaultdict(dict))
    """The chunks by tensor, and by the chunk's first byte in it."""
    hashed: asyncio.Event = field(default_factory=asyncio.Event)
    _starts: list[int] = field(default_factory=list)
    _sums_at: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._starts = [piece.start for piece in self.pieces]
        self._sums_at = sorted((at, placeholder) for placeholder, at in self.file.sums)

    def parts(self, chunk_bytes: int) -> list[FileSpan]:
        return [
            FileSpan(piece, start, min(chunk_bytes, piece.stop - start))
            for piece in self.pieces
            for start in range(piece.start, piece.stop, chunk_bytes)
        ]

    def bytes_of(self, piece: FilePiece, start: int, nbytes: int) -> Bytes:
        """The bytes at byte `start` of the file, without the sums."""
        first = self.places[piece.fqn] + piece.at + start - piece.start
        return self.buffer[first : first + nbytes]

    def fill(self, out: Bytes, start: int) -> None:
        """Fill `out` with the file's bytes from `start` on, sums included."""
        stop = start + len(out)
        for piece in self.pieces[max(0, bisect_right(self._starts, start) - 1) :]:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= stop:
                break
            out[low - start : high - start] = self.bytes_of(piece, low, high - low)
        for at, placeholder in self._sums_at[bisect_left(self._sums_at, (start - SUM_BYTES + 1, 0)) :]:
            low, high = max(start, at), min(stop, at + SUM_BYTES)
            if low >= stop:
                break
            out[low - start : high - start] = np.frombuffer(self._sum(placeholder), np.uint8)[low - at : high - at]

    def _sum(self, placeholder: int) -> bytes:
        combined = 0
        for _, (nbytes, one) in sorted(self.sums[placeholder].items()):
            combined = zlib_ng.crc32_combine(combined, one, nbytes)
        return struct.pack("<I", combined)

    def note(self, part: FileSpan, data: Bytes) -> tuple[str, int, Chunk]:
        """The chunk of a part, with its tensor and its first byte in that tensor."""
        chunk = Encoded.raw_of(data).at(self.number, part.start)
        return part.piece.fqn, part.piece.at + part.start - part.piece.start, chunk


async def write_files(job: PersistJob, files: FilesNode) -> Index:
    """Write `files` durably, and return the index that names all of them, which is not written yet."""
    layouts = _layouts(job, files)
    job.progress.begin(job.shard.nbytes)
    job.progress.keep(0)
    job = job.in_small_writes()
    async with discarded_on_error() as opened:
        for layout in layouts:
            key = job.info.key(file_name(job.info.rank, layout.number))
            opened.append(await job.store.open_writer(key, size_hint=layout.file.size))
        await _write(job, layouts, opened)
        for layout, target in zip(layouts, opened, strict=True):
            with job.spent.disk.busy():
                await target.finish(layout.file.size)
    job.rates.measured_disk(job.spent.disk.nbytes, job.spent.disk.seconds)
    await run_workers([partial(_hash_around, job, layout) for layout in layouts], 1, job.check_stop)
    return _index(job, layouts)


def _layouts(job: PersistJob, files: FilesNode) -> list[FileProgress]:
    """The files with their pieces. Raises FormatError unless each tensor is part of exactly one file."""
    check_files(files)
    sizes = {tensor.fqn: tensor.nbytes for tensor in job.shard.tensors}
    places = {tensor.fqn: tensor.offset for tensor in job.shard.tensors}
    used = [fqn for file in files.files for fqn in (file.hollow, *(fqn for _, fqn in file.placeholders))]
    if sorted(used) != sorted(sizes):
        raise FormatError("the files of a shard do not take each of its tensors once; this is a defect, please report it")
    return [
        FileProgress(file, number, pieces_of(file, sizes), job.shard.buffer, places) for number, file in enumerate(files.files)
    ]


async def _write(job: PersistJob, layouts: Sequence[FileProgress], targets: Sequence[ObjectWriter]) -> None:
    """Hash each file while the file before it is written, since its sums must be known before it is written."""
    hashing: list[list[Work]] = [list(_hashing(job, layout)) for layout in layouts]
    share = Share(job.progress, job.shard.nbytes, sum(layout.file.size for layout in layouts))
    writing: list[list[Work]] = [
        list(_writing(job, layout, target, share)) for layout, target in zip(layouts, targets, strict=True)
    ]
    works: list[Work] = [
        work
        for hashes, writes in zip([*hashing, []], [[], *writing], strict=True)
        for pair in zip_longest(hashes, writes)
        for work in pair
        if work is not None
    ]
    config = job.config
    writes = max(config.writes, job.store.capabilities.at_once)
    await run_workers(works, max(1, min(writes, config.budget_bytes // config.block_bytes)), job.check_stop)


# --- hashing ----------------------------------------------------------------------------------------------------


def _hashing(job: PersistJob, layout: FileProgress) -> Iterator[Work]:
    placeholders = [part for part in layout.parts(job.config.chunk_bytes) if part.piece.placeholder is not None]
    groups = grouped(placeholders, job.config.block_bytes)
    left = [len(groups)]
    if not groups:
        layout.hashed.set()
    for group in groups:
        yield partial(_hash, job, layout, group, left)


async def _hash(job: PersistJob, layout: FileProgress, group: list[FileSpan], left: list[int]) -> None:
    try:
        with job.spent.hash.busy():
            found = await asyncio.get_running_loop().run_in_executor(None, _hash_group, layout, group)
    except BaseException:
        layout.hashed.set()  # ends the writes that wait for it; the error stops the others
        raise
    for part, crc, (fqn, at, chunk) in found:
        assert part.piece.placeholder is not None
        layout.sums[part.piece.placeholder][part.start] = part.nbytes, crc
        layout.chunks[fqn][at] = chunk
    left[0] -= 1
    if not left[0]:
        layout.hashed.set()


def _hash_group(layout: FileProgress, group: Iterable[FileSpan]) -> list[tuple[FileSpan, int, tuple[str, int, Chunk]]]:
    found = []
    for part in group:
        data = layout.bytes_of(part.piece, part.start, part.nbytes)
        found.append((part, zlib_ng.crc32(data), layout.note(part, data)))
    return found


async def _hash_around(job: PersistJob, layout: FileProgress) -> None:
    """Hash the bytes between placeholders, with the sums among them."""
    with job.spent.hash.busy():
        found = await asyncio.get_running_loop().run_in_executor(None, _hashed_around, job, layout)
    for fqn, at, chunk in found:
        layout.chunks[fqn][at] = chunk


def _hashed_around(job: PersistJob, layout: FileProgress) -> list[tuple[str, int, Chunk]]:
    found = []
    for part in layout.parts(job.config.chunk_bytes):
        if part.piece.placeholder is None:
            data = np.empty(part.nbytes, np.uint8)
            layout.fill(data, part.start)
            found.append(layout.note(part, data))
    return found


# --- writing ----------------------------------------------------------------------------------------------------


def _writing(job: PersistJob, layout: FileProgress, target: ObjectWriter, share: Share) -> Iterator[Work]:
    for start in range(0, layout.file.size, job.config.block_bytes):
        nbytes = min(job.config.block_bytes, layout.file.size - start)
        yield partial(_write_block, layout, start, nbytes, target, job, share)


async def _write_block(
    layout: FileProgress, start: int, nbytes: int, target: ObjectWriter, job: PersistJob, share: Share
) -> None:
    await layout.hashed.wait()
    job.check_stop()
    # Whole pages where they are needed; `finish` cuts the file to its size.
    block = page_buffer(page_up(nbytes))[: up_to(nbytes, job.store.capabilities.alignment)]
    await asyncio.get_running_loop().run_in_executor(None, layout.fill, block[:nbytes], start)
    with job.spent.disk.busy(nbytes):
        await target.write_at(start, block.data)
    share.written(nbytes)


# --- the index --------------------------------------------------------------------------------------------------


def _index(job: PersistJob, layouts: Sequence[FileProgress]) -> Index:
    chunks = {fqn: parts for layout in layouts for fqn, parts in layout.chunks.items()}
    info = job.info
    objects = [ObjectRef(name=file_name(info.rank, one.number), size=one.file.size) for one in layouts]
    return index_of(job, objects, lambda tensor: tuple(chunk for _, chunk in sorted(chunks.get(tensor.fqn, {}).items())))
