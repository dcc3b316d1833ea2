"""A shard that is files: each becomes an object of its own, byte for byte what it will be for others.

Invariants
  F3  When `write_files` returns, every file is durable, whole, and has its sums.
  F4  When it returns or raises, no thread reads the image any more.
  F5  Memory beside the image stays below `budget_bytes`: a block for each write.
  F6  Every byte of every file belongs to one chunk of the index, as it stands in the file: whoever verifies the chunks has
      verified the files.
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

from checkpointd.codec.checksum import xxh3_64, xxh3_128
from checkpointd.errors import FormatError
from checkpointd.layout.files import SUM_BYTES, Piece, check_files, pieces_of
from checkpointd.layout.keys import file_name
from checkpointd.layout.manifest import Chunk, Index, ObjectRef, TensorEntry
from checkpointd.layout.tree import File, Files
from checkpointd.pipeline.chunks import Persist, in_pieces
from checkpointd.pipeline.pages import page_buffer, page_up
from checkpointd.pipeline.rates import Meter
from checkpointd.pipeline.shard import Bytes, ShardTensor, Share
from checkpointd.pipeline.spans import grouped
from checkpointd.pipeline.workers import run_workers
from checkpointd.store.base import ObjectWriter

Work = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Part:
    """What becomes one chunk: `nbytes` bytes of a file from its byte `start` on, which lie in one piece."""

    piece: Piece
    start: int
    nbytes: int


@dataclass(slots=True)
class Layout:
    """One file, and what is known of it so far. `hashed` is set once every sum is known, or hashing has failed."""

    file: File
    number: int
    pieces: list[Piece]
    image: Bytes
    places: dict[str, int]
    """Where each tensor begins in the image."""
    sums: dict[int, dict[int, tuple[int, int]]] = field(default_factory=lambda: defaultdict(dict))
    """By room, by the first byte of a part: its bytes, and their CRC-32."""
    chunks: dict[str, dict[int, Chunk]] = field(default_factory=lambda: defaultdict(dict))
    """By tensor, by the first byte in it."""
    hashed: asyncio.Event = field(default_factory=asyncio.Event)
    _starts: list[int] = field(default_factory=list)
    _sums_at: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._starts = [piece.start for piece in self.pieces]
        self._sums_at = sorted((at, room) for room, at in self.file.sums)

    def parts(self, chunk_bytes: int) -> list[Part]:
        return [
            Part(piece, start, min(chunk_bytes, piece.stop - start))
            for piece in self.pieces
            for start in range(piece.start, piece.stop, chunk_bytes)
        ]

    def bytes_of(self, piece: Piece, start: int, nbytes: int) -> Bytes:
        """Bytes of the image that stand at byte `start` of the file, sums not yet put in."""
        first = self.places[piece.fqn] + piece.at + start - piece.start
        return self.image[first : first + nbytes]

    def fill(self, out: Bytes, start: int) -> None:
        """Fill `out` with the file's bytes from `start` on, sums included."""
        stop = start + len(out)
        for piece in self.pieces[max(0, bisect_right(self._starts, start) - 1) :]:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= stop:
                break
            out[low - start : high - start] = self.bytes_of(piece, low, high - low)
        for at, room in self._sums_at[bisect_left(self._sums_at, (start - SUM_BYTES + 1, 0)) :]:
            low, high = max(start, at), min(stop, at + SUM_BYTES)
            if low >= stop:
                break
            out[low - start : high - start] = np.frombuffer(self._sum(room), np.uint8)[low - at : high - at]

    def _sum(self, room: int) -> bytes:
        combined = 0
        for _, (nbytes, one) in sorted(self.sums[room].items()):
            combined = zlib_ng.crc32_combine(combined, one, nbytes)
        return struct.pack("<I", combined)

    def note(self, part: Part, data: Bytes) -> tuple[str, int, Chunk]:
        """The chunk that a part becomes: of which tensor, from which byte of it on."""
        chunk = Chunk(self.number, part.start, part.nbytes, part.nbytes, "raw", xxh3_64(data), xxh3_128(data))
        return part.piece.fqn, part.piece.at + part.start - part.piece.start, chunk


async def write_files(job: Persist, files: Files) -> Index:
    """Write `files`, durably, and return the index that names all of them (not yet written)."""
    layouts = _layouts(job, files)
    job.progress.begin(job.shard.nbytes)
    job.progress.keep(0)
    job = in_pieces(job)
    opened: list[ObjectWriter] = []
    meter = Meter()
    try:
        for layout in layouts:
            key = job.info.key(file_name(job.info.rank, layout.number, job.info.hand))
            opened.append(await job.store.open_writer(key, size_hint=layout.file.size))
        await _write(job, layouts, opened, meter)
        for layout, target in zip(layouts, opened, strict=True):
            async with meter.writing(0):
                await target.finish(layout.file.size)
    except BaseException:
        for target in opened:
            await target.discard()
        raise
    job.rates.measured_disk(meter.nbytes, meter.seconds)
    await run_workers([partial(_hash_around, job, layout) for layout in layouts], 1, job.check_stop)
    return _index(job, layouts)


def _layouts(job: Persist, files: Files) -> list[Layout]:
    """FormatError where a tensor is not part of just one file."""
    check_files(files)
    sizes = {tensor.fqn: tensor.nbytes for tensor in job.shard.tensors}
    places = {tensor.fqn: tensor.offset for tensor in job.shard.tensors}
    used = [fqn for file in files.files for fqn in (file.hollow, *(fqn for _, fqn in file.rooms))]
    if sorted(used) != sorted(sizes):
        raise FormatError("the files of a shard do not take each of its tensors once; this is a defect, please report it")
    return [Layout(file, number, pieces_of(file, sizes), job.shard.image, places) for number, file in enumerate(files.files)]


async def _write(job: Persist, layouts: Sequence[Layout], targets: Sequence[ObjectWriter], meter: Meter) -> None:
    """Hash one file while the one before it is written: its sums must be known before it is."""
    hashing: list[list[Work]] = [list(_hashing(job, layout)) for layout in layouts]
    share = Share(job.progress, job.shard.nbytes, sum(layout.file.size for layout in layouts))
    writing: list[list[Work]] = [
        list(_writing(job, layout, target, meter, share)) for layout, target in zip(layouts, targets, strict=True)
    ]
    works: list[Work] = [
        work
        for hashes, writes in zip([*hashing, []], [[], *writing], strict=True)
        for pair in zip_longest(hashes, writes)
        for work in pair
        if work is not None
    ]
    config = job.config
    await run_workers(works, max(1, min(config.writes, config.budget_bytes // config.block_bytes)), job.check_stop)


# --- hashing ----------------------------------------------------------------------------------------------------


def _hashing(job: Persist, layout: Layout) -> Iterator[Work]:
    rooms = [part for part in layout.parts(job.config.chunk_bytes) if part.piece.room is not None]
    groups = grouped(rooms, job.config.block_bytes)
    left = [len(groups)]
    if not groups:
        layout.hashed.set()
    for group in groups:
        yield partial(_hash, layout, group, left)


async def _hash(layout: Layout, group: list[Part], left: list[int]) -> None:
    try:
        found = await asyncio.get_running_loop().run_in_executor(None, _hash_group, layout, group)
    except BaseException:
        layout.hashed.set()  # whoever waits for it must end; the error ends the rest
        raise
    for part, crc, (fqn, at, chunk) in found:
        assert part.piece.room is not None
        layout.sums[part.piece.room][part.start] = part.nbytes, crc
        layout.chunks[fqn][at] = chunk
    left[0] -= 1
    if not left[0]:
        layout.hashed.set()


def _hash_group(layout: Layout, group: Iterable[Part]) -> list[tuple[Part, int, tuple[str, int, Chunk]]]:
    found = []
    for part in group:
        data = layout.bytes_of(part.piece, part.start, part.nbytes)
        found.append((part, zlib_ng.crc32(data), layout.note(part, data)))
    return found


async def _hash_around(job: Persist, layout: Layout) -> None:
    """The bytes between rooms, as they stand in the file."""
    for fqn, at, chunk in await asyncio.get_running_loop().run_in_executor(None, _hashed_around, job, layout):
        layout.chunks[fqn][at] = chunk


def _hashed_around(job: Persist, layout: Layout) -> list[tuple[str, int, Chunk]]:
    found = []
    for part in layout.parts(job.config.chunk_bytes):
        if part.piece.room is None:
            data = np.empty(part.nbytes, np.uint8)
            layout.fill(data, part.start)
            found.append(layout.note(part, data))
    return found


# --- writing ----------------------------------------------------------------------------------------------------


def _writing(job: Persist, layout: Layout, target: ObjectWriter, meter: Meter, share: Share) -> Iterator[Work]:
    for start in range(0, layout.file.size, job.config.block_bytes):
        nbytes = min(job.config.block_bytes, layout.file.size - start)
        yield partial(_write_block, layout, start, nbytes, target, meter, job, share)


async def _write_block(
    layout: Layout, start: int, nbytes: int, target: ObjectWriter, meter: Meter, job: Persist, share: Share
) -> None:
    await layout.hashed.wait()
    job.check_stop()
    block = page_buffer(page_up(nbytes))  # whole pages; `finish` cuts what is too much
    await asyncio.get_running_loop().run_in_executor(None, layout.fill, block[:nbytes], start)
    async with meter.writing(nbytes):
        await target.write_at(start, block.data)
    share.written(nbytes)


# --- the index --------------------------------------------------------------------------------------------------


def _index(job: Persist, layouts: Sequence[Layout]) -> Index:
    chunks = {fqn: parts for layout in layouts for fqn, parts in layout.chunks.items()}
    info = job.info
    return Index(
        tag=info.tag,
        attempt=str(info.attempt),
        rank=info.rank,
        world_size=info.world_size,
        step=info.step,
        objects=tuple(ObjectRef(name=file_name(info.rank, one.number, info.hand), size=one.file.size) for one in layouts),
        tensors=tuple(_entry(tensor, chunks.get(tensor.fqn, {})) for tensor in job.shard.tensors),
        aliases=(),
        excluded=(),
        tree=job.shard.tree,
    )


def _entry(tensor: ShardTensor, chunks: dict[int, Chunk]) -> TensorEntry:
    ordered = tuple(chunk for _, chunk in sorted(chunks.items()))
    return TensorEntry(tensor.fqn, tensor.dtype, tensor.shape, tensor.box, tensor.scope, ordered)
