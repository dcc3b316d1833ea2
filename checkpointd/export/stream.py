"""Streams tensors from the chunks of a checkpoint to their places in files, converted on the way, a batch at a time.

Invariants
  STREAM-1  Beside the read budget, memory holds two batches: one that is read and one that is written. A view whose elements
      are scattered over its owner is a batch of its own, and holds the part of the owner that it lies in.
  STREAM-2  The bytes of a tensor are written in order, so that a checksum of them can be kept on the way.
"""

from __future__ import annotations

import asyncio
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from checkpointd.codec.convert import convert
from checkpointd.config import LoadConfig
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
    """A tensor, the dtype that it gets, and where its bytes go: byte `offset` of the file at `path`."""

    tensor: Exported
    dtype: str
    path: str
    offset: int

    @property
    def nbytes(self) -> int:
        return self.count * ITEM_BYTES[self.dtype]

    @property
    def count(self) -> int:
        """Elements."""
        count = 1
        for size in self.tensor.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Slab:
    """Elements `[start, stop)` of a placed tensor, counted row-major in it."""

    placed: PlacedTensor
    start: int
    stop: int

    @property
    def held(self) -> range:
        """The elements of the source that are read for it."""
        view = self.placed.tensor.view
        return range(view.offset + self.start, view.offset + self.stop) if view.contiguous else view.span

    @property
    def nbytes(self) -> int:
        """Memory that it takes while it is read."""
        return len(self.held) * ITEM_BYTES[self.dtype]

    @property
    def dtype(self) -> str:
        """Of what is read: a scattered view is converted when it has been gathered."""
        tensor = self.placed.tensor
        return self.placed.dtype if tensor.view.contiguous else tensor.dtype

    def wants(self, memory: NDArray[Any]) -> Iterator[BoxRequest]:
        """What fills `memory`, which has room for the elements that are held."""
        source, at = self.placed.tensor.source, 0
        for box in boxes_of_range(source.shape, self.held.start, self.held.stop):
            part = memory[at : at + box.numel()].reshape(box.sizes)
            yield BoxRequest(source.fqn, box, Converting(part, box, source.dtype, self.dtype), source.rank)
            at += box.numel()

    def finished(self, memory: NDArray[Any]) -> NDArray[Any]:
        """The elements of the slab as they are written, once `memory` is filled."""
        tensor = self.placed.tensor
        if tensor.view.contiguous:
            return memory
        strides = [stride * memory.itemsize for stride in tensor.view.stride]
        gathered = np.ascontiguousarray(as_strided(memory, tensor.view.shape, strides, writeable=False)).reshape(-1)
        return convert(gathered, tensor.dtype, self.placed.dtype)


@dataclass(frozen=True, slots=True)
class Converting:
    """A sink that fills `memory`, which holds the box `frame`, with elements of another dtype."""

    memory: NDArray[Any]
    frame: Box
    source: str
    target: str

    def __call__(self, box: Box, elements: NDArray[Any]) -> None:
        self.memory[slices(self.frame, box)] = convert(elements, self.source, self.target)


Batch = list[tuple[Slab, NDArray[Any]]]


async def stream(
    store: Store,
    world: CheckpointView,
    placed: Sequence[PlacedTensor],
    config: LoadConfig,
    batch_bytes: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> dict[str, int]:
    """Fill the files, which exist and have their size, with the bytes of `placed`; returns the CRC-32 of each by name.

    `on_bytes` hears of what was written. Raises the first damage that was met, StoreError where reading fails, and OSError
    where writing does.
    """
    sums = {item.tensor.name: 0 for item in placed}
    found = batches(slabs_of(placed, batch_bytes), batch_bytes)
    await pump(store, world, found, config, lambda batch: _write(batch, sums, on_bytes))
    return sums


async def pump(
    store: Store, world: CheckpointView, found: Iterable[list[Slab]], config: LoadConfig, write: Callable[[Batch], None]
) -> None:
    """Read one batch after the other, each while the one before is written: `write` runs on a thread, one call at a time.

    When this returns or raises, nobody writes any more. Raises the first damage that was met, and what `write` raises.
    """
    loop = asyncio.get_running_loop()
    writing: asyncio.Future[None] | None = None
    try:
        for slabs in found:
            batch = await _read(store, world, slabs, config)
            if writing is not None:
                await asyncio.shield(writing)
            writing = loop.run_in_executor(None, write, batch)
            del batch
    finally:
        if writing is not None:
            await _ended(writing)
    if writing is not None:
        writing.result()


async def _ended(writing: asyncio.Future[None]) -> None:
    """Wait until nobody writes any more, however often this is cancelled: the files are about to go."""
    cancelled: asyncio.CancelledError | None = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    writing.exception()  # looked at: what went wrong first is raised
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
    """`slabs` in order, in batches of at most `batch_bytes` of memory where they are no larger."""
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
    """`placed` in order, cut into slabs of at most `slab_bytes` where a tensor can be cut."""
    for item in placed:
        count = item.count
        step = max(1, slab_bytes // ITEM_BYTES[item.dtype]) if item.tensor.view.contiguous else max(1, count)
        for start in range(0, count, step):
            yield Slab(item, start, min(start + step, count))


def _write(batch: Batch, sums: dict[str, int], on_bytes: Callable[[int], None]) -> None:
    """Each slab to its place; a file is opened once for the slabs that follow each other in it."""
    path, descriptor = "", -1
    try:
        for slab, memory in batch:
            item = slab.placed
            if item.path != path:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor = -1
                descriptor, path = os.open(item.path, os.O_WRONLY | os.O_CLOEXEC), item.path
            data = slab.finished(memory).view(np.uint8).data
            _write_at(descriptor, data, item.offset + slab.start * ITEM_BYTES[item.dtype])
            sums[item.tensor.name] = zlib.crc32(data, sums[item.tensor.name])
            on_bytes(data.nbytes)
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data`, past short writes."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
