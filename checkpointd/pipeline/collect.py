"""Remove the bulk of dead attempts: mark first, then sweep, so that a crash in between leaves nothing half-removed in sight.

Invariants
  G1  The `deleted` mark of a committed attempt is durable before any of its objects goes.
  G2  Outcome and votes of an aborted attempt stay: no late vote can revive it.
  G3  The `deleted` mark is the last object of an attempt to go.
  G4  Of a checkpoint nothing goes that a vote's index names. An object of a rank whose chain outcome, vote, index cannot be
      read as it was committed stays.
  G5  An attempt's own writers tidy up its tag only while no newer epoch has begun: a job that starts later sees their commit,
      and never loads what it replaced. One that had started before may be loading it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from checkpointd.commit.retention import AttemptFacts, dead_weight, spent_records, with_spare_objects
from checkpointd.errors import DamagedError, NotFoundError
from checkpointd.layout.keys import DELETED, attempt_prefix, object_hand, object_rank, vote_name
from checkpointd.layout.manifest import Deleted, encode
from checkpointd.pipeline import catalog, epochs
from checkpointd.pipeline.identity import writer
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


async def collect(store: Store, attempts: Iterable[AttemptFacts]) -> int:
    """Remove what `dead_weight` and `spent_records` name among `attempts`, and what hands wrote in vain beside checkpoints.

    Returns the number of attempts swept of all their bulk.
    """
    known = list(attempts)
    dead = dead_weight(known)
    for facts, reason in dead:
        prefix = attempt_prefix(facts.tag, facts.attempt)
        if facts.state == "committed":
            await store.put_if_absent(f"{prefix}/{DELETED}", encode(Deleted(reason=reason, writer=writer())))
        await _sweep(store, prefix)
    for facts in with_spare_objects(known):
        await _drop_unnamed(store, facts)
    for facts in spent_records(known):
        await _forget(store, attempt_prefix(facts.tag, facts.attempt))
    return len(dead)


async def collect_tag(store: Store, tag: str) -> int:
    """The same for one tag, after one of its attempts was decided."""
    return await collect(store, [a.facts for a in await catalog.attempts_of(store, tag)])


async def tidy(store: Store, tag: str, epoch: int) -> bool:
    """The same for a writer of an attempt of `epoch`; False where a newer one has begun, and nothing was removed (G5)."""
    if await epochs.newest(store) > epoch:
        return False
    await collect_tag(store, tag)
    return True


async def _sweep(store: Store, prefix: str) -> None:
    for entry in await store.list(prefix):
        if entry.name.endswith((".index", ".chunks")):
            await store.delete(f"{prefix}/{entry.name}")


async def _drop_unnamed(store: Store, facts: AttemptFacts) -> None:
    """Remove what other hands than the one that voted wrote; a hand that still writes drops the rest when it learns of it."""
    prefix = attempt_prefix(facts.tag, facts.attempt)
    names = [entry.name for entry in await store.list(prefix)]
    for rank in facts.contested:
        try:
            outcome = await catalog.read_outcome(store, facts.tag, facts.attempt)
            vote = await catalog.read_vote(store, f"{prefix}/{vote_name(rank)}", outcome.votes[str(rank)].digest)
            index = await catalog.index_named_by(store, prefix, vote)
        except (DamagedError, NotFoundError, KeyError) as error:
            log.error("%s: what rank %d does not need cannot be told from what it does: %s", prefix, rank, error)
            continue
        assert vote.index is not None
        named = {vote.index.name, *(ref.name for ref in index.objects)}
        for name in names:
            if object_rank(name) == rank and object_hand(name) is not None and name not in named:
                await store.delete(f"{prefix}/{name}")


async def _forget(store: Store, prefix: str) -> None:
    names = [entry.name for entry in await store.list(prefix) if entry.name != DELETED]
    for name in [*names, DELETED]:
        await store.delete(f"{prefix}/{name}")
