"""Meetings of the job's ranks before there is a start, even if they name different directories.

Invariants
  CONVENE-1  A rank that calls alone gets an error after its own time-out, which names the ranks that did not come. It makes no
      Checkpointer before that.
  CONVENE-2  The ranks first meet by tokens and agree on a board. From then on they hold numbered meetings on it. A void meeting
      ends the board for every rank that learns of it. These ranks then meet by tokens again, so no rank stays apart.
  CONVENE-3  A process has one Assembly, so ranks meet even if they name different directories, or make different calls.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # exported, but not in __all__

from checkpointd.config import Ranks
from checkpointd_client.ranks.board import Board, broadcast_from_coordinator, find_ranks, group_ranks, open_board, own_store
from checkpointd_client.ranks.rendezvous import Meetings, meet_until

_PREFIX = "checkpointd/convening"


@dataclass(slots=True)
class Assembly:
    """One rank's meetings with the other ranks of its process group. `store`: the group's store; None if there is no group."""

    ranks: Ranks
    store: Callable[[], Store] | None
    board: Callable[[Ranks, str], Board] = open_board
    _meetings: Meetings | None = None
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, said: str, doing: str, timeout_s: float) -> dict[int, str]:
        """Meet when all ranks are `doing` the same; returns the message of each. DeadlineError names the missing ranks."""
        with self._alone:
            return meet_until(lambda: self._next(said, doing, timeout_s), time.monotonic() + timeout_s, doing)

    def _next(self, said: str, doing: str, timeout_s: float) -> tuple[dict[int, str] | None, int]:
        meetings, self._meetings = self._meetings, None  # until one has taken place (CONVENE-2)
        if meetings is None:
            meetings = self._begun(doing, timeout_s)
        meetings.timeout_s = timeout_s
        heard, gone = meetings.once(said, doing)
        if heard is not None:
            self._meetings = meetings
        return heard, gone

    def _begun(self, doing: str, timeout_s: float) -> Meetings:
        """Meetings on a new board, which all ranks agree on."""
        store = None if self.store is None else PrefixStore(_PREFIX, self.store())
        found = broadcast_from_coordinator(
            self.ranks, lambda: {"nonce": secrets.token_hex(16)}, doing=doing, come_s=timeout_s, make_s=timeout_s, store=store
        )
        return Meetings(self.board(self.ranks, f"convening/{found['nonce']}"), self.ranks, timeout_s)


_assembly: tuple[int, object, Assembly] | None = None


def convene(said: str, doing: str, timeout_s: float) -> dict[int, str]:
    """Meet with all ranks of the job when they are `doing` the same; returns the message of each. DeadlineError names the ranks
    that do not come within `timeout_s` seconds. Call it on every rank, after init_process_group.
    """
    global _assembly
    group = None if group_ranks() is None else dist.distributed_c10d._get_default_store()
    known = _assembly
    if known is None or known[0] != os.getpid() or known[1] is not group:
        _assembly = known = (os.getpid(), group, Assembly(find_ranks(), None if group is None else own_store))
    return known[2].meet(said, doing, timeout_s)
