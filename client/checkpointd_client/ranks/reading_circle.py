"""Reading circles: ranks that load the same chunks, and send each other what they read over torch.distributed (gloo).

A circle has a process group of its own, which nobody else knows: training makes no call in it, and it ends with the load. Its
calls have a time-out of their own, so a rank that is gone ends the circle and not the load; the next agreement of all ranks
then names it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # exported, but not in __all__

from checkpointd.pipeline.read.shared_reads import CircleBroken
from checkpointd_client.ranks.board import own_store
from checkpointd_client.ranks.load_messages import Circles
from checkpointd_client.ranks.load_rounds import LoadRound

log = logging.getLogger("checkpointd")

SIZE_MAX = 64
"""The most ranks of a circle: each rank of it has a connection to each other one."""
WAIT_S_MAX = 60.0
"""The longest wait for another rank of the circle."""


def circles_of(reads: dict[int, str]) -> Circles:
    """The circles of ranks that gave the same `reads`."""
    alike: dict[str, list[int]] = {}
    for rank, text in sorted(reads.items()):
        if text:
            alike.setdefault(text, []).append(rank)
    parts = (ranks[start : start + SIZE_MAX] for ranks in alike.values() for start in range(0, len(ranks), SIZE_MAX))
    return Circles(token=secrets.token_hex(16), circles=tuple(tuple(part) for part in parts if len(part) > 1))


class ReadingCircle:
    """This rank's part of one circle. Raises CircleBroken if not all `ranks` come within `wait_s`."""

    def __init__(self, ranks: tuple[int, ...], rank: int, token: str, wait_s: float) -> None:
        self.size, self.place = len(ranks), ranks.index(rank)
        self._ranks = ranks
        store = PrefixStore(f"checkpointd/circle/{token}/{ranks[0]}", own_store())
        try:
            self._group = dist.ProcessGroupGloo(store, self.place, self.size, timedelta(seconds=wait_s))
        except (RuntimeError, ValueError) as error:
            raise self._broken(error) from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpointd-circle")

    async def pass_on(self, memory: memoryview, source: int) -> None:
        """Send or receive one turn, on the circle's thread."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._pass_on, self._group, memory, source)

    def _pass_on(self, group: dist.ProcessGroupGloo, memory: memoryview, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        try:
            broadcast = group.broadcast  # type: ignore[attr-defined]  # missing in the stub
            broadcast([torch.frombuffer(memory, dtype=torch.uint8)], options).wait()
        except (RuntimeError, ValueError) as error:
            raise self._broken(error) from error

    def leave(self) -> None:
        """Close the connections, once a call on the thread has ended."""
        del self._group
        self._thread.shutdown(wait=False)

    def _broken(self, error: Exception) -> CircleBroken:
        return CircleBroken(f"a rank out of {list(self._ranks)} did not answer ({str(error).splitlines()[0]})")


@dataclass(slots=True)
class RankSharing:
    """Finds the circle of this rank in one load round. Every rank of the round must `join` or `decline` once."""

    load_round: LoadRound
    name: str
    _said: bool = False

    async def join(self, reads: bytes) -> ReadingCircle | None:
        """The circle of the ranks that read the same; None if there is no other, or if it cannot be formed."""
        return await asyncio.get_running_loop().run_in_executor(None, self._join, reads.hex())

    def decline(self) -> None:
        """Say that this rank reads by itself, if it has not said anything yet."""
        if not self._said:
            self._join("")

    def _join(self, reads: str) -> ReadingCircle | None:
        self._said = True
        if reads and not dist.is_gloo_available():
            log.warning("this rank reads by itself: its torch was built without gloo")
            reads = ""
        rank, rounds = self.load_round.rounds.ranks.rank, self.load_round.rounds
        found = self.load_round.circles(self.name, reads, circles_of)
        ranks = next((ranks for ranks in found.circles if rank in ranks), None)
        if ranks is None:
            return None
        try:
            return ReadingCircle(ranks, rank, found.token, min(WAIT_S_MAX, rounds.timeout_s / 2))
        except CircleBroken as error:
            log.warning("this rank reads by itself: %s", error)
            return None
