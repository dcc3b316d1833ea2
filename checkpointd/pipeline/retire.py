"""Apply retention: look at the checkpoints of a root, let `commit/retention.py` choose, and collect what it chose.

Safe beside everything else that goes on at the root: what is removed is a checkpoint that is not the newest, it gets its mark
first, and what newer ones refer to stays (`collect.py`).
"""

from __future__ import annotations

from datetime import UTC, datetime

from checkpointd.commit.retention import AttemptFacts, CheckpointFacts, Retention, retired
from checkpointd.errors import DamagedError
from checkpointd.layout.keys import VERIFIED
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline import catalog, epochs
from checkpointd.pipeline.catalog import AttemptView
from checkpointd.pipeline.collect import Removal, collect
from checkpointd.pipeline.showing import abandoned
from checkpointd.store.base import Store


async def retire(store: Store, rules: Retention, epoch: int) -> list[Removal]:
    """Remove what `rules` let go, as the coordinator of `epoch`; nothing where a newer one has begun (G5)."""
    if (rules.keeps_all and store.plain_files is None) or await epochs.newest(store) > epoch:
        return []
    views = await catalog.scan(store)
    chosen = await chosen_by(store, views, rules)
    removed = await abandoned(store)
    chosen += [(v.facts, "somebody removed its directory") for v in views if v.prefix in removed and v.state == "committed"]
    return await collect(store, [view.facts for view in views], chosen) if chosen else []


async def chosen_by(store: Store, views: list[AttemptView], rules: Retention) -> list[tuple[AttemptFacts, str]]:
    """The checkpoints among `views` that `rules` let go, oldest first."""
    return retired(await facts_of(store, views), rules)


async def facts_of(store: Store, views: list[AttemptView]) -> list[CheckpointFacts]:
    """What retention knows of the checkpoints among `views`: the last commit of each tag, the others being dead weight."""
    pointer = await _pointer(store)
    by_prefix = {view.prefix: view for view in views}
    found = []
    for checkpoint in catalog.checkpoints_of(views):
        view, outcome = by_prefix[checkpoint.prefix], checkpoint.outcome
        found.append(
            CheckpointFacts(
                attempt=view.facts,
                order=outcome.order,
                step=outcome.step,
                save_latest=outcome.save_latest,
                is_latest=checkpoint.tag == pointer,
                verified=VERIFIED in view.sizes,
                age_s=_age_s(outcome),
                metrics=outcome.metrics,
            )
        )
    return found


async def _pointer(store: Store) -> str | None:
    try:
        return await catalog.latest(store)
    except DamagedError:
        return None


def _age_s(outcome: Outcome) -> float | None:
    """By two clocks that may differ: good enough to choose among old checkpoints, and nothing else rests on it."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(outcome.writer.time)).total_seconds()
    except (ValueError, TypeError):
        return None
