"""Remove the bulk of dead attempts: mark first, then sweep, so that a crash in between leaves nothing half-removed in sight.

Invariants
  G1  The `deleted` mark of a committed attempt is durable before any of its objects goes.
  G2  Outcome and votes stay: no late vote can revive a dead attempt.
"""

from __future__ import annotations

from collections.abc import Iterable

from checkpointd.commit.retention import AttemptFacts, dead_weight
from checkpointd.layout.keys import DELETED, attempt_prefix
from checkpointd.layout.manifest import Deleted, encode
from checkpointd.pipeline import catalog
from checkpointd.pipeline.identity import writer
from checkpointd.store.base import Store


async def collect(store: Store, attempts: Iterable[AttemptFacts]) -> int:
    """Remove what `dead_weight` names among `attempts`; the number of attempts swept."""
    dead = dead_weight(attempts)
    for facts, reason in dead:
        prefix = attempt_prefix(facts.tag, facts.attempt)
        if facts.state == "committed":
            await store.put_if_absent(f"{prefix}/{DELETED}", encode(Deleted(reason=reason, writer=writer())))
        await _sweep(store, prefix)
    return len(dead)


async def collect_tag(store: Store, tag: str) -> int:
    """The same for one tag, after one of its attempts was decided."""
    return await collect(store, [a.facts for a in await catalog.attempts_of(store, tag)])


async def _sweep(store: Store, prefix: str) -> None:
    for entry in await store.list(prefix):
        if entry.name.endswith((".index", ".chunks")):
            await store.delete(f"{prefix}/{entry.name}")
