"""Remove the bulk of dead attempts: mark first, then sweep, so that a crash in between leaves nothing half-removed in sight.

Invariants
  G1  The `deleted` mark of a committed attempt is durable before any of its objects goes.
  G2  Outcome and votes of an aborted attempt stay: no late vote can revive it.
  G3  The `deleted` mark is the last object of an attempt to go.
"""

from __future__ import annotations

from collections.abc import Iterable

from checkpointd.commit.retention import AttemptFacts, dead_weight, spent_records
from checkpointd.layout.keys import DELETED, attempt_prefix
from checkpointd.layout.manifest import Deleted, encode
from checkpointd.pipeline import catalog
from checkpointd.pipeline.identity import writer
from checkpointd.store.base import Store


async def collect(store: Store, attempts: Iterable[AttemptFacts]) -> int:
    """Remove what `dead_weight` and `spent_records` name among `attempts`; the number of attempts swept of their bulk."""
    known = list(attempts)
    dead = dead_weight(known)
    for facts, reason in dead:
        prefix = attempt_prefix(facts.tag, facts.attempt)
        if facts.state == "committed":
            await store.put_if_absent(f"{prefix}/{DELETED}", encode(Deleted(reason=reason, writer=writer())))
        await _sweep(store, prefix)
    for facts in spent_records(known):
        await _forget(store, attempt_prefix(facts.tag, facts.attempt))
    return len(dead)


async def collect_tag(store: Store, tag: str) -> int:
    """The same for one tag, after one of its attempts was decided."""
    return await collect(store, [a.facts for a in await catalog.attempts_of(store, tag)])


async def _sweep(store: Store, prefix: str) -> None:
    for entry in await store.list(prefix):
        if entry.name.endswith((".index", ".chunks")):
            await store.delete(f"{prefix}/{entry.name}")


async def _forget(store: Store, prefix: str) -> None:
    names = [entry.name for entry in await store.list(prefix) if entry.name != DELETED]
    for name in [*names, DELETED]:
        await store.delete(f"{prefix}/{name}")
