"""Which checkpoint to load, and what had to be passed over because it cannot be read.

Invariant
  U1  A checkpoint that may be newer than the candidate and cannot be found whole is named, never left out in silence.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from checkpointd.commit.retention import Order
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import LATEST, OUTCOME, vote_name
from checkpointd.pipeline import catalog
from checkpointd.pipeline.catalog import AttemptView, Checkpoint
from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class Candidates:
    """The checkpoints that asked for `latest`, newest first, and the damage met on the way to them.

    What is `passed_over` may be newer than all of them; `other` damage is to older ones, or a pointer to nowhere.
    """

    checkpoints: tuple[Checkpoint, ...]
    passed_over: tuple[DamagedError, ...]
    other: tuple[DamagedError, ...]


async def candidates(store: Store) -> Candidates:
    """What there is to load at `store` without naming a tag."""
    # First: what it names was committed before, so the scan must find it.
    pointer = await _pointer(store)
    attempts = await catalog.scan(store)
    known = catalog.checkpoints_of(attempts)
    # What the pointer names counts, too, where its tag was saved again without asking for it.
    found = tuple(c for c in known if c.outcome.save_latest or c.tag == pointer)
    over: list[DamagedError] = []
    other: list[DamagedError] = []
    for attempt in attempts:
        if attempt.state == "damaged":
            older = found and await _order_at_most(store, attempt) < found[0].outcome.order
            (other if older else over).append(_damage(attempt))
    if pointer is not None and pointer not in {c.tag for c in known}:
        named = [a for a in attempts if a.tag == pointer]
        if not any(a.state == "damaged" for a in named):
            (over if named else other).append(await _missing(store, pointer))
    return Candidates(found, tuple(over), tuple(other))


async def _pointer(store: Store) -> str | None:
    try:
        return await catalog.latest(store)
    except DamagedError:
        return None  # nothing is loaded by it, and the next start sets it right


def _damage(attempt: AttemptView) -> DamagedError:
    key = f"{attempt.prefix}/{OUTCOME}"
    return DamagedError(f"the outcome of {attempt.prefix} cannot be read: {attempt.damage}", key=key)


async def _order_at_most(store: Store, attempt: AttemptView) -> Order:
    """The order of an attempt whose outcome cannot be read: rank 0's vote knows it; without, the last of its epoch."""
    try:
        vote = await catalog.read_vote(store, f"{attempt.prefix}/{vote_name(0)}")
    except (NotFoundError, DamagedError):
        return (attempt.attempt.epoch, sys.maxsize)
    return (attempt.attempt.epoch, vote.n)


async def _missing(store: Store, tag: str) -> DamagedError:
    try:
        why = f"{(await catalog.find(store, tag)).prefix} was committed only now"
    except (NotFoundError, DamagedError) as error:
        why = str(error)
    return DamagedError(f"latest names {tag}, which cannot be loaded: {why}", key=LATEST)
