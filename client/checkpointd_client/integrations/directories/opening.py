"""Opens the root for load_checkpoint: a Checkpointer that begins there, or an Onlooker if this job cannot begin.

Invariants
  OPENING-1  All ranks read in the same way: rank 0 says whether the root may be written to, and a Checkpointer is made on all
      ranks or on none.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from checkpointd.config import ABSENCE_S, PINNED_BYTES
from checkpointd.errors import CheckpointdError, RootInUseError, StoreError, UnreadableError
from checkpointd.layout.keys import LEASES, LOG, SERVICE
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd_client.core import Core
from checkpointd_client.examining import Taker
from checkpointd_client.loaded import Loaded
from checkpointd_client.onlooker import Onlooker
from checkpointd_client.ranks.board import COORDINATOR, find_ranks
from checkpointd_client.restore.target_chooser import TargetChooser

log = logging.getLogger("checkpointd")

DOING = "calling load_checkpoint()"
Said = tuple[bool, str]
"""Sent by rank 0 before a root is opened: whether it may be written to, and a nonce for an Onlooker."""


class Opened(Protocol):
    """The methods of a Checkpointer or an Onlooker that a load needs."""

    def meet(self, said: str, doing: str) -> dict[int, str]: ...

    def load(self, state: TargetChooser, tag: str | None = None, *, cast: bool = False) -> Loaded | None: ...

    def take_up(self) -> None: ...

    def go_on_from(self, checkpoint: LoggedAttempt) -> None: ...

    def pass_over(self, prefix: str, why: str) -> None: ...

    def removed(self) -> frozenset[str]: ...

    def damage(self, checkpoint: LoggedAttempt, ranks: Iterable[int], taker: Taker | None = None) -> tuple[str, ...]: ...

    def checkpoints(self) -> list[LoggedAttempt]: ...


def said_of(store: str) -> Said:
    """The message of this rank about the root `store`, of which that of rank 0 counts."""
    places = (store, *(os.path.join(store, key) for key in (SERVICE, LOG, LEASES)))
    return all(_may_write(place) for place in places if os.path.isdir(place)), secrets.token_hex(16)


def _may_write(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


@contextmanager
def opened(
    store: str, begin: Callable[[], Core], said: Said, timeout_s: float, options: Mapping[str, Any], *, saves: bool
) -> Iterator[Opened]:
    """Open the root `store` with the Checkpointer that `begin` makes, or else read-only. `options`: those of Checkpointer.

    `saves`: whether this job saves at no other root. Then RootInUseError is raised at once, not at the first save.
    """
    is_writable, nonce = said
    why = "it may not be written to"
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
        log.warning("%s is opened read-only, since %s: this job cannot save there now", store, why)
    with Onlooker(
        store,
        nonce,
        timeout_s=timeout_s,
        absence_s=options.get("absence_s", ABSENCE_S),
        pickle_client_state=options.get("pickle_client_state", False),
        pinned_bytes=options.get("pinned_bytes", PINNED_BYTES),
    ) as onlooker:
        yield onlooker


def known_of(opened: Opened) -> tuple[dict[str, LoggedAttempt], str | None]:
    """The checkpoints by prefix, newest first, and the error if they cannot be listed. `first_said` raises it on all ranks."""
    try:
        return {c.prefix: c for c in opened.checkpoints()}, None
    except CheckpointdError as error:
        return {}, str(error)


WHOLE = "whole"
"""The answer of a rank whose part of a checkpoint is whole."""
UNREADABLE = "unreadable:"
"""Begins the answer of a rank that cannot read its part now."""


def words_of(opened: Opened, checkpoint: LoggedAttempt | None, rank: int, world_size: int, taker: Taker | None = None) -> str:
    """Read the part of a checkpoint that `rank` verifies and judge it in words. Raises nothing: the other ranks wait for the
    answer.
    """
    if checkpoint is None:
        return f"{UNREADABLE} rank {rank} does not see it"
    own = range(rank, checkpoint.commit.world_size, world_size)
    try:
        damage = "; ".join(opened.damage(checkpoint, own, taker))
    except StoreError as error:
        return f"{UNREADABLE} rank {rank} cannot read it now: {error}"
    except CheckpointdError as error:
        damage = f"rank {rank} cannot read it: {error}"
    return damage or WHOLE


def first_said(opened: Opened, found: Any, fault: str | None) -> Any:
    """What rank 0 found, on every rank. UnreadableError on every rank if rank 0 has a `fault`: it could not list."""
    heard = opened.meet(json.dumps([found, fault]), DOING)
    first, fault = json.loads(heard[0])
    if fault is not None:
        raise UnreadableError(f"rank 0 cannot list the checkpoints to load: {fault}")
    return first
