"""Packs encoded chunks back to back into one object, through a few aligned blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from checkpointd.config import PersistConfig
from checkpointd.pipeline.meter import Meter
from checkpointd.pipeline.pages import page_buffer, up_to
from checkpointd.pipeline.shard import Bytes
from checkpointd.store.base import ObjectWriter


class Packer:
    """Gathers bytes into blocks and writes each full block; the last one is filled up to `alignment`. At most `writes` blocks
    exist at once, or `at_once` if the budget has room for four times as many.

    `on_written` is called with the raw and the stored bytes of each written block.
    """

    def __init__(
        self,
        target: ObjectWriter,
        config: PersistConfig,
        alignment: int,
        meter: Meter,
        on_written: Callable[[int, int], None] = lambda _, __: None,
        at_once: int = 1,
    ) -> None:
        self._target = target
        self._alignment = alignment
        self._meter = meter
        self._on_written = on_written
        self._block_bytes = config.block_bytes
        affordable = config.budget_bytes // config.block_bytes
        blocks = max(2, min(config.writes, affordable // 2), min(at_once, affordable // 4))
        self._free: asyncio.Queue[Bytes] = asyncio.Queue()
        self._unmade = blocks
        self._block: Bytes | None = None
        self._filled = 0
        self._raw = 0
        """The raw bytes in the current block."""
        self._base = 0
        self._writing: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._turn = asyncio.Lock()

    async def add(self, data: memoryview, raw: int) -> int:
        """Append `data`, which encodes `raw` raw bytes, and return its byte offset in the object."""
        async with self._turn:
            offset, left, told = self._base + self._filled, np.frombuffer(data, dtype=np.uint8), 0
            while left.size:
                block = await self._current()
                taken = min(left.size, self._block_bytes - self._filled)
                block[self._filled : self._filled + taken] = left[:taken]
                self._filled, left = self._filled + taken, left[taken:]
                share = raw * (len(data) - left.size) // len(data)
                self._raw, told = self._raw + share - told, share
                if self._filled == self._block_bytes:
                    self._send(self._block_bytes)
            return offset

    async def flush(self) -> int:
        """Write the rest, and wait for all blocks. Returns the object's size in bytes."""
        size = self._base + self._filled
        if self._filled and self._block is not None:
            self._block[self._filled :] = 0
            self._send(up_to(self._filled, self._alignment))
        await self.drain()
        if self._error:
            raise self._error
        return size

    async def drain(self) -> None:
        """Wait until no block is being written."""
        while self._writing:
            await asyncio.wait(set(self._writing))

    async def _current(self) -> Bytes:
        if self._error:
            raise self._error
        if self._block is None:
            if self._unmade and self._free.empty():
                self._unmade -= 1
                self._block = page_buffer(self._block_bytes)
            else:
                self._block = await self._free.get()
            if self._error:
                raise self._error
        return self._block

    def _send(self, nbytes: int) -> None:
        block, base, held = self._block, self._base, (self._raw, self._filled)
        assert block is not None
        self._block, self._base, self._filled, self._raw = None, base + self._filled, 0, 0
        self._spawn(self._write(block, base, nbytes, held))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, block: Bytes, base: int, nbytes: int, held: tuple[int, int]) -> None:
        try:
            with self._meter.busy(nbytes):
                await self._target.write_at(base, block[:nbytes].data)
            self._on_written(*held)
        except BaseException as error:  # the next add or flush raises it to the caller
            self._error = self._error or error
        finally:
            self._free.put_nowait(block)
