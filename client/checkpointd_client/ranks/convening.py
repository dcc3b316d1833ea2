"""Meetings of the job's ranks before there is an epoch, even if they name different directories.

Invariants
  CONVENE-1  A rank that calls alone hears of it after its own time-out, with the ranks that did not come. No Checkpointer is
      made before.
  CONVENE-2  The ranks meet by tokens first, and agree on a board; from then on they meet at numbered meetings on it. One that
      did not take place ends the board for every rank that learns of it. They then meet by tokens again, so nobody stays apart.
  CONVENE-3  There is one of these in a process, so ranks that name different directories, or call different things, hear each
      other.
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
from checkpointd_client.ranks.board import Board, broadcast_from_coordinator, find_ranks, open_board, own_store
from checkpointd_client.ranks.rendezvous import Meetings, gone_error

_PREFIX = "checkpointd/convening"


@dataclass(slots=True)
class Assembly:
    """The ranks of one process group, as this one of them meets them. `store`: its store; None where there is one rank."""

    ranks: Ranks
    store: Callable[[], Store] | None
    board: Callable[[Ranks, str], Board] = open_board
    _meetings: Meetings | None = None
    _alone: threading.Lock = field(default_factory=threading.Lock)

    def meet(self, said: str, doing: str, timeout_s: float) -> dict[int, str]:
        """What every rank said, by rank, once all are `doing` the same. DeadlineError names those that did not come in time."""
        with self._alone:
            until, gone = time.monotonic() + timeout_s, None
            while gone is None or time.monotonic() < until:
                heard, gone = self._next(said, doing, timeout_s)
                if heard is not None:
                    return heard
            raise gone_error(gone, doing)

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
        """Meetings on a board that nobody has used, which all ranks have agreed on."""
        store = None if self.store is None else PrefixStore(_PREFIX, self.store())
        found = broadcast_from_coordinator(
            self.ranks, lambda: {"nonce": secrets.token_hex(16)}, doing=doing, come_s=timeout_s, make_s=timeout_s, store=store
        )
        return Meetings(self.board(self.ranks, f"convening/{found['nonce']}"), self.ranks, timeout_s)


_assembly: tuple[int, object, Assembly] | None = None


def convene(said: str, doing: str, timeout_s: float) -> dict[int, str]:
    """What every rank of the job says, by rank, when all of them are `doing` the same. DeadlineError names those that do not
    come within `timeout_s` seconds. Call it on every rank, after init_process_group.
    """
    global _assembly
    group = dist.distributed_c10d._get_default_store() if dist.is_available() and dist.is_initialized() else None
    known = _assembly
    if known is None or known[0] != os.getpid() or known[1] is not group:
        _assembly = known = (os.getpid(), group, Assembly(find_ranks(), None if group is None else own_store))
    return known[2].meet(said, doing, timeout_s)
