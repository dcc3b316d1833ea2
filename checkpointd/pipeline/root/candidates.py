"""The candidates of a load, newest first, and the record that a load passed over a damaged one.

Invariants
  CANDIDATE-1  A load that names no tag tries the checkpoints in the order of their commits, the newest first. It passes over a
      damaged one only with a report, and never over one that cannot be read now.
  CANDIDATE-3  A checkpoint of a branch that was left is never a candidate, however damaged the others are.
"""

from __future__ import annotations

import logging

from checkpointd.commit.branches import commits_of, newest_of
from checkpointd.errors import NotFoundError, UnreadableError
from checkpointd.layout.keys import LATEST
from checkpointd.layout.log_records import LoggedAttempt, LogState, PassOverRecord
from checkpointd.pipeline.root import root_view
from checkpointd.pipeline.root.log import RootLog
from checkpointd.store.base import Store
from checkpointd.store.patient import Patience

logger = logging.getLogger("checkpointd")


def candidates(state: LogState) -> list[LoggedAttempt]:
    """The checkpoints for a load that names no tag, newest first."""
    return [one for one in commits_of(state.attempts.values()) if one.may_be_latest]


async def listed(store: Store, patience: Patience) -> list[LoggedAttempt]:
    """All checkpoints, newest first. Raises as `known_state`."""
    return root_view.checkpoints_of((await known_state(store, patience)).attempts.values())


async def known_state(store: Store, patience: Patience) -> LogState:
    """The state of the log, with further looks if it cannot be read. Raises UnreadableError if the storage does not tell."""
    with patience.looks() as looks:
        while True:
            try:
                return await root_view.state_of(store)
            except UnreadableError as error:
                await looks.unreadable(error)


def nonce_of(store: Store, chosen: LoggedAttempt) -> str:
    """That of the start which saved `chosen`, as of the last look; empty if the log does not know the start any more."""
    begins = RootLog.of(store).state.begins
    return next((one.nonce for one in begins if one.start == chosen.id.start), "")


async def newest(store: Store) -> LoggedAttempt | None:
    """The checkpoint that `latest` means where a tag is expected: the one that a load would try first. None if there is none.
    Usually the file `latest` names it; it may lag behind, or somebody may have edited it.
    """
    return newest_of(await root_view.state_of(store))


async def named(store: Store, tag: str | None) -> str:
    """`tag`, or for `latest` and None the tag of the checkpoint that a load would try first. NotFoundError if there is none."""
    return tag if tag is not None and tag != LATEST else meant(await root_view.state_of(store), store.url).tag


def meant(state: LogState, root: str) -> LoggedAttempt:
    """The checkpoint that `latest` means in `state`, of `root`. Raises NotFoundError if there is none."""
    found = newest_of(state)
    if found is None:
        raise NotFoundError(f"there is no {LATEST} at {root}: nothing was committed there yet")
    return found


async def note_passed_over(store: Store, prefix: str, why: str) -> None:
    """Record that load() passed over the checkpoint `prefix`, so that retention and gc never remove it. One that was removed
    meanwhile gets no record.
    """
    if refused := await RootLog.of(store).add(PassOverRecord(attempt=prefix, why=why)):
        logger.info("%s", refused)
