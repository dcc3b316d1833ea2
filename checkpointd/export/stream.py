"""Streams tensors from the chunks of a checkpoint to their places in files, batch by batch, and converts their dtypes.

Invariants
  STREAM-1  Beside the read budget, memory holds two batches: one that is read and one that is written. A view with scattered
      elements is read as one slab, which holds the shortest run of its owner that contains them.
  STREAM-2  The bytes of a tensor are written in order, so that their checksum can be computed on the way.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from checkpointd.codec.convert import convert
from checkpointd.config import LoadConfig
from checkpointd.export.output import FilePart, on_thread, write_parts
from checkpointd.export.selection import Exported
from checkpointd.layout.boxes import Box, boxes_of_range
from checkpointd.layout.dtypes import ITEM_BYTES
from checkpointd.layout.regions import slices
from checkpointd.pipeline.read.checkpoint_view import CheckpointView
from checkpointd.pipeline.read.load import read_boxes
from checkpointd.pipeline.read.plan import CARRIERS, BoxRequest
from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor, its dtype in the export, and the place of its bytes: at byte `offset` of the file at `path`."""

    tensor: Exported
    dtype: str
    path: str
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.tensor.shape)


@dataclass(frozen=True, slots=True)
class Slab:
    """Elements `[start, stop)` of a placed tensor, in row-major order."""

    placed: PlacedTensor
    start: int
    stop: int

    @property
    def held(self) -> range:
        """The elements of the source that are read for the slab."""
        view = self.placed.tensor.view
        return range(view.offset + self.start, view.offset + self.stop) if view.contiguous else view.span

    @property
    def nbytes(self) -> int:
        """The memory that the slab takes while it is read."""
        return len(self.held) * ITEM_BYTES[self.dtype]

    @property
    def dtype(self) -> str:
        """The dtype while reading. A scattered view is converted only after its elements were gathered."""
        tensor = self.placed.tensor
        return self.placed.dtype if tensor.view.contiguous else tensor.dtype

    def wants(self, memory: NDArray[Any]) -> Iterator[BoxRequest]:
        """The requests that fill `memory`, which has room for the elements in `held`."""
        source, at = self.placed.tensor.source, 0
        for box in boxes_of_range(source.shape, self.held.start, self.held.stop):
            part = memory[at : at + box.numel()].reshape(box.sizes)
            yield BoxRequest(source.fqn, box, Converting(part, box, source.dtype, self.dtype), source.rank)
            at += box.numel()

    def finished(self, memory: NDArray[Any]) -> NDArray[Any]:
        """The elements of the slab as they are written; `memory` was filled before."""
        tensor = self.placed.tensor
        if tensor.view.contiguous:
            return memory
        strides = [stride * memory.itemsize for stride in tensor.view.stride]
        gathered = np.ascontiguousarray(as_strided(memory, tensor.view.shape, strides, writeable=False)).reshape(-1)
        return convert(gathered, tensor.dtype, self.placed.dtype)


@dataclass(frozen=True, slots=True)
class Converting:
    """A sink that fills `memory`, the box `frame` of a tensor, and converts elements from `source` to `target`."""

    memory: NDArray[Any]
    frame: Box
    source: str
    target: str

    def __call__(self, box: Box, elements: NDArray[Any]) -> None:
        self.memory[slices(self.frame, box)] = convert(elements, self.source, self.target)


Batch = list[tuple[Slab, NDArray[Any]]]


Turn = Callable[[int], Awaitable[None]]
"""Called before each batch is read, with the number of its bytes, and with 0 before the result is shown. It waits if the
export has to yield, and raises if the export must end.
"""


async def at_once(_: int) -> None:
    """The `Turn` of an export that never yields."""


async def stream(
    store: Store,
    world: CheckpointView,
    placed: Sequence[PlacedTensor],
    config: LoadConfig,
    batch_bytes: int,
    on_bytes: Callable[[int], None] = lambda _: None,
    *,
    write: Callable[[Sequence[FilePart]], Awaitable[None]] | None = None,
    turn: Turn = at_once,
) -> dict[str, int]:
    """Fill the files, which exist and have their size, with the bytes of `placed`; returns the CRC-32 of each by name.

    `on_bytes` receives the number of bytes after each write. `write`: by default, it writes to files of this machine. Raises
    the first damage, StoreError if reading fails, and what `write` raises.
    """
    sums = {item.tensor.name: 0 for item in placed}
    found = batches(slabs_of(placed, batch_bytes), batch_bytes)

    async def write_batch(batch: Batch) -> None:
        parts = await on_thread(lambda: _parts(batch, sums))
        await (on_thread(lambda: write_parts(parts)) if write is None else write(parts))
        on_bytes(sum(part.data.nbytes for part in parts))

    await pump(store, world, found, config, write_batch, turn)
    return sums


async def pump(
    store: Store,
    world: CheckpointView,
    found: Iterable[list[Slab]],
    config: LoadConfig,
    write: Callable[[Batch], Awaitable[None]],
    turn: Turn = at_once,
) -> None:
    """Read batches one after another, each while the one before is written by `write`, one call at a time.

    No write is running any more when this returns or raises. Raises the first damage, and the errors of `write`.
    """
    writing: asyncio.Future[None] | None = None
    try:
        for slabs in found:
            await turn(sum(slab.nbytes for slab in slabs))
            batch = await _read(store, world, slabs, config)
            if writing is not None:
                await asyncio.shield(writing)
            writing = asyncio.ensure_future(write(batch))
            del batch
        if writing is not None:
            await asyncio.shield(writing)
    except BaseException:
        if writing is not None:
            writing.cancel()
            await _ended(writing)
        raise


async def _ended(writing: asyncio.Future[None]) -> None:
    """Wait until the write has ended, even if this is cancelled several times: the caller then removes the files."""
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    if not writing.cancelled():
        writing.exception()  # marks it as retrieved, since an earlier error is raised instead
    if cancelled is not None:
        raise cancelled


async def _read(store: Store, world: CheckpointView, slabs: Sequence[Slab], config: LoadConfig) -> Batch:
    batch = [(slab, np.empty(len(slab.held), CARRIERS[ITEM_BYTES[slab.dtype]])) for slab in slabs]
    wants = [want for slab, memory in batch for want in slab.wants(memory)]
    damage = await read_boxes(store, world, wants, config)
    if damage:
        raise damage[0]
    return batch


def batches(slabs: Iterable[Slab], batch_bytes: int) -> Iterator[list[Slab]]:
    """`slabs` in order, in batches of at most `batch_bytes` of memory. A larger slab is a batch of its own."""
    batch: list[Slab] = []
    room = batch_bytes
    for slab in slabs:
        if batch and slab.nbytes > room:
            yield batch
            batch, room = [], batch_bytes
        batch.append(slab)
        room -= slab.nbytes
    if batch:
        yield batch


def slabs_of(placed: Iterable[PlacedTensor], slab_bytes: int) -> Iterator[Slab]:
    """`placed` in order, cut into slabs of at most `slab_bytes`. Tensors with scattered elements are not cut."""
    for item in placed:
        count = item.count
        step = max(1, slab_bytes // ITEM_BYTES[item.dtype]) if item.tensor.view.contiguous else max(1, count)
        for start in range(0, count, step):
            yield Slab(item, start, min(start + step, count))


def _parts(batch: Batch, sums: dict[str, int]) -> list[FilePart]:
    """The bytes of each slab with their place, and their checksums in `sums`."""
    parts = []
    for slab, memory in batch:
        item, data = slab.placed, slab.finished(memory).view(np.uint8).data
        sums[item.tensor.name] = zlib.crc32(data, sums[item.tensor.name])
        parts.append(FilePart(item.path, item.offset + slab.start * ITEM_BYTES[item.dtype], data))
    return parts
