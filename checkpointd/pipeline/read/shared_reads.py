"""Shared reads: ranks that load the same chunks form a circle. Each byte is read by one of them, which sends it to the others.

The groups of chunks are dealt out in turn, so each rank reads an equal part of the bytes. All ranks go through all groups in
one order.

Invariants
  SHARE-1  What came from another rank is verified here as if it had been read here. If it is wrong, the group is read from the
      storage, and only that shows whether the storage is damaged.
  SHARE-2  Bytes of another rank are received into buffers, never into the memory of a tensor: nothing can change it once it is
      verified.
  SHARE-3  Nothing depends on the circle. A rank that gets no answer leaves the circle and reads the rest by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.shard import Bytes

log = logging.getLogger("checkpointd")


class CircleBroken(CheckpointdError):
    """A rank of the circle did not answer, or has left it."""


class Circle(Protocol):
    """The ranks that read the same, seen from one of them, which is number `place` of `size`."""

    @property
    def size(self) -> int: ...

    @property
    def place(self) -> int: ...

    async def pass_on(self, memory: memoryview, source: int) -> None:
        """Send `memory` to the others if `source` is this rank's place, else fill it with what that one sends.

        Every rank of the circle must call this for the same turns in the same order. Raises CircleBroken within bounded time.
        """
        ...

    def leave(self) -> None:
        """Take no part any more. The other ranks then get CircleBroken."""
        ...


class Sharing(Protocol):
    """The way to a circle for one load."""

    async def join(self, reads: bytes) -> Circle | None:
        """The circle of the ranks that gave the same `reads`; None if no other rank did."""
        ...


@dataclass(slots=True)
class Turn:
    """The turn of one group: `memory` for its bytes, and `reading` if this rank reads it. `finish` verifies and delivers it."""

    source: int
    memory: Bytes
    reading: asyncio.Task[None] | None
    held: AsyncExitStack
    finish: Callable[[], Awaitable[None]]


async def take_turns(circle: Circle, begin: Sequence[Callable[[], Awaitable[Turn]]], ahead: int) -> None:
    """Take all turns in order, and leave the circle; at most `ahead` turns are begun before they are passed on.

    Returns early if the circle breaks or a read fails: what no `finish` has noted as done is then still to be read. No thread
    uses the memory of a turn any more then.
    """
    begun: asyncio.Queue[Turn | None] = asyncio.Queue()
    room, works = asyncio.Semaphore(ahead), list[asyncio.Task[None]]()

    async def begin_all() -> None:
        try:
            for make in begin:
                await room.acquire()
                begun.put_nowait(await make())
        finally:
            begun.put_nowait(None)

    async def finish(turn: Turn) -> None:
        async with turn.held:
            await turn.finish()

    beginning = asyncio.create_task(begin_all())
    try:
        while (turn := await begun.get()) is not None:
            if turn.reading is not None:
                works.append(turn.reading)
                await asyncio.shield(turn.reading)
            await circle.pass_on(turn.memory.data, turn.source)
            works.append(asyncio.create_task(finish(turn)))
            room.release()
    except CheckpointdError as error:
        log.warning("this rank reads what is left by itself, without the other ranks that load the same: %s", error)
    finally:
        circle.leave()
        beginning.cancel()
        works += [turn.reading for turn in _left(begun) if turn.reading is not None]
        ended = await asyncio.gather(beginning, *works, return_exceptions=True)
    for result in ended:
        if isinstance(result, Exception) and not isinstance(result, CheckpointdError):
            raise result


def _left(begun: asyncio.Queue[Turn | None]) -> Iterator[Turn]:
    while not begun.empty():
        if (turn := begun.get_nowait()) is not None:
            yield turn
