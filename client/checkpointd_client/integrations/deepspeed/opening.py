"""Opens the root for load_checkpoint: a Checkpointer that begins there, or an Onlooker if this job cannot begin.

Invariants
  OPENING-1  All ranks read by the same: rank 0 says whether the root may be written to, and a Checkpointer is refused on all or
      none.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from checkpointd.config import ABSENCE_S
from checkpointd.errors import RootInUseError
from checkpointd.layout.keys import LEASES, SERVICE, epoch_key
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd_client.core import Core
from checkpointd_client.examining import Taker
from checkpointd_client.loader import Loaded
from checkpointd_client.onlooker import Onlooker
from checkpointd_client.ranks.board import COORDINATOR, find_ranks
from checkpointd_client.restore.target_chooser import TargetChooser

log = logging.getLogger("checkpointd")

Said = tuple[bool, str]
"""What rank 0 says before a root is opened: whether it may be written to, and a nonce for an Onlooker."""


class Opened(Protocol):
    """What a load needs of either."""

    def meet(self, said: str, doing: str) -> dict[int, str]: ...

    def load(self, state: TargetChooser, tag: str | None = None, *, cast: bool = False) -> Loaded | None: ...

    def take_up(self) -> None: ...

    def pass_over(self, tag: str, why: str) -> None: ...

    def removed(self) -> frozenset[str]: ...

    def damage(self, checkpoint: Checkpoint, ranks: Iterable[int], taker: Taker | None = None) -> tuple[str, ...]: ...

    def checkpoints(self) -> list[Checkpoint]: ...


def said_of(store: str) -> Said:
    """What this rank would say of the root `store`."""
    places = (store, *(os.path.join(store, key) for key in (SERVICE, os.path.dirname(epoch_key(1)), LEASES)))
    return all(_may_write(place) for place in places if os.path.isdir(place)), secrets.token_hex(16)


def _may_write(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


@contextmanager
def opened(
    store: str, begin: Callable[[], Core], said: Said, timeout_s: float, options: Mapping[str, Any], *, saves: bool
) -> Iterator[Opened]:
    """The root `store`, read by what `begin` makes, if it can. `options`: those of Checkpointer.

    `saves`: whether this job saves at no other root. It is then refused with RootInUseError at once, not at its first save.
    """
    is_writable, nonce = said
    why = "nothing may be written there"
    if is_writable:
        try:
            checkpointer = begin()
        except RootInUseError:
            if saves:
                raise
            why = "another job is alive there"
        else:
            checkpointer.settle()  # another engine of this process may have saved there
            yield checkpointer
            return
    if find_ranks().rank == COORDINATOR:
        log.warning("%s is only read, since %s: it stays as it is, and this engine cannot save there now", store, why)
    with Onlooker(
        store,
        nonce,
        timeout_s=timeout_s,
        absence_s=options.get("absence_s", ABSENCE_S),
        pickle_client_state=options.get("pickle_client_state", False),
    ) as onlooker:
        yield onlooker
