"""Copies one object from one store to another, and checks each piece of it on the way; reads pieces of one that is there.

Invariants
  TRANSFER-1  An object is finished at the destination only if every piece of it that was named has passed with its digest.
  TRANSFER-2  A byte is read once. BLOCKS blocks of BLOCK_BYTES are in memory for each object that is copied.
  TRANSFER-3  An object that is replaced stays as it is until the new one has passed and takes its place, whole and durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from checkpointd.errors import CheckpointdError, DamagedError, NotFoundError
from checkpointd.mirror.pieces import PassingCheck, StoredPiece, spans
from checkpointd.pipeline.pages import page_buffer
from checkpointd.store.base import ObjectWriter, Store
from checkpointd.waits import to_the_end

BLOCK_BYTES = 8 << 20
BLOCKS = 4
"""One block is read while the others are written."""


async def copied(
    source: Store,
    destination: Store,
    key: str,
    size: int,
    pieces: Sequence[StoredPiece],
    *,
    check: Callable[[], Awaitable[None]],
    on_bytes: Callable[[int], None],
    replaces: bool = False,
) -> None:
    """Copy the object `key` of `size` bytes, and make it durable at the destination. There is none, or `replaces` is set.

    Raises DamagedError if a piece is wrong. What was written is then discarded, but only if `check` says that the destination
    is still this process's own: another one may write an object of that name by now.
    """
    opened = destination.open_replacement if replaces else destination.open_writer
    writer = await opened(key, size_hint=size)
    try:
        await _stream(source, writer, key, size, PassingCheck(key, pieces), on_bytes)
        await check()
        await writer.finish(size)
    except BaseException:
        with suppress(CheckpointdError):
            if not replaces:
                await check()
            await writer.discard()
        raise


async def _stream(
    source: Store, writer: ObjectWriter, key: str, size: int, passing: PassingCheck, on_bytes: Callable[[int], None]
) -> None:
    """Read one block after the other, while those before it are written."""
    buffers = [page_buffer(min(size, BLOCK_BYTES)) for _ in range(min(BLOCKS, -(-size // BLOCK_BYTES)))]
    writing: dict[int, asyncio.Future[None]] = {}
    try:
        for number, (start, stop) in enumerate(_blocks(0, size)):
            slot = number % BLOCKS
            if slot in writing:
                await asyncio.shield(writing[slot])
            block = buffers[slot][: stop - start]
            await source.get_parts(key, start, [block.data], partial(passing.take, start, block.data))
            writing[slot] = asyncio.ensure_future(writer.write_at(start, block.data))
            on_bytes(stop - start)
    finally:  # a thread may still read a buffer
        if writing:
            await to_the_end(asyncio.gather(*writing.values(), return_exceptions=True))
    for done in writing.values():
        done.result()
    if not passing.is_done:
        raise DamagedError(f"{key} has {size} bytes, fewer than its index names", key=key)


def _blocks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, BLOCK_BYTES):
        yield at, min(at + BLOCK_BYTES, stop)


async def is_whole(store: Store, key: str, pieces: Sequence[StoredPiece], on_bytes: Callable[[int], None]) -> bool:
    """Whether every one of `pieces` lies in the object `key` as it should, by the bytes of the storage itself."""
    uncached, passing, buffer = store.uncached, PassingCheck(key, pieces), page_buffer(BLOCK_BYTES)
    try:
        for first, last, _ in spans(pieces):
            for start, stop in _blocks(first, last):
                block = buffer[: stop - start]
                await uncached.get_parts(key, start, [block.data], partial(passing.take, start, block.data))
                on_bytes(stop - start)
    except (DamagedError, NotFoundError):
        return False
    return passing.is_done
