"""Finds out which saves lie in the spools of all ranks, so that older ones need not be uploaded (TURN-2 in `turns.py`).

Each rank counts its shard on the ranks' board once it is durable in its spool. At its next save, it asks whether all ranks
have done so. If the board does not answer, that stays unknown, and older saves stay in the spool.

A shard that went straight to the root does not count. Its vote may not have been stored, and if it is the coordinator's, the
next start does not go on with the save: only the commit shows that the save is whole.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from checkpointd.commit.facts import Order
from checkpointd.commit.machine import IN_SPOOL, Phase
from checkpointd.errors import CheckpointdError
from checkpointd.pipeline.shard import AttemptInfo
from checkpointd_client.ranks.board import Board

log = logging.getLogger("checkpointd")
T = TypeVar("T")

ASKED_MAX = 4
"""How many of the newest saves each look asks about."""
HEAR_S = 1.0
"""How long the board may take to answer before a save goes on without its answer."""
COUNTED_MAX = 64
"""After so many further saves, nobody asks about a save any more, and each rank removes its number from the board."""


class SpooledByAll:
    """`on_whole` is called with the order of each save that all ranks have. All methods run on the writer's loop."""

    def __init__(self, board: Board, world_size: int, on_whole: Callable[[Order], None]) -> None:
        self._board, self._world_size, self._on_whole = board, world_size, on_whole
        self._newest: int | None = None
        """The number `n` of the newest save that all ranks have, as far as is known."""
        self._counted: OrderedDict[str, Order] = OrderedDict()
        """The saves of which this rank has counted its shard, by the key on the board."""
        self._looking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._calling = asyncio.Lock()

    def entered(self, info: AttemptInfo, phase: Phase) -> None:
        """This rank's save has entered `phase`. Once its shard is in the spool, count it."""
        key = f"spooled/{info.prefix}"
        if phase not in IN_SPOOL or self._board.is_solo or not info.save_latest or key in self._counted:
            return
        self._counted[key] = (info.attempt.start, info.n)
        self._spawn(self._ask([key], 1))
        if len(self._counted) > COUNTED_MAX:
            oldest, _ = self._counted.popitem(last=False)
            self._spawn(self._forget(oldest))

    def look(self) -> None:
        """Ask whether all ranks have a newer save than the newest that is known."""
        known = -1 if self._newest is None else self._newest
        keys = [key for key, (_, n) in reversed(self._counted.items()) if n > known][:ASKED_MAX]
        if keys and (self._looking is None or self._looking.done()):
            self._looking = self._spawn(self._ask(keys, 0))

    async def heard(self) -> int | None:
        """The number `n` of the newest save that all ranks have, as far as is known when the last look has ended."""
        if self._looking is not None:
            await asyncio.wait({self._looking}, timeout=HEAR_S)
        return self._newest

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _ask(self, keys: Sequence[str], more: int) -> None:
        """Add `more` to the numbers under `keys`, up to the first that all ranks have counted."""

        def first_whole() -> str | None:
            return next((key for key in keys if self._board.count(key, more) >= self._world_size), None)

        try:
            whole = await self._call(first_whole)
        except CheckpointdError as error:
            log.info("whether all ranks have a save in their spools cannot be told: %s", error)
            return
        if whole is not None and (order := self._counted.get(whole)) is not None:
            self._newest = max(order[1], -1 if self._newest is None else self._newest)
            self._on_whole(order)

    async def _forget(self, key: str) -> None:
        try:
            await self._call(lambda: self._board.forget(key, agreed=True))
        except CheckpointdError as error:
            log.info("a number stays on the board: %s", error)

    async def _call(self, call: Callable[[], T]) -> T:
        """Call the board, once at a time. The thread is none of the writer's, and the end of the process does not wait for it:
        a board that hangs holds up neither saves nor the exit.
        """
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()

        def work() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        async with self._calling:
            threading.Thread(target=work, name="checkpointd-board", daemon=True).start()
            return await asyncio.wrap_future(answer)
