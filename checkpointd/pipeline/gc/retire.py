"""Retires checkpoints, by rules or because their tag was saved again: `commit/retention.py` chooses, `collect.py` removes.

Safe beside everything else that goes on at the root: what is removed is a checkpoint that is not the newest, it gets its mark
first, and what newer ones refer to stays (`collect.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from checkpointd.commit.facts import AttemptFacts
from checkpointd.commit.retention import CheckpointFacts, RemovalChoice, Retention, choose
from checkpointd.errors import DamagedError
from checkpointd.layout.keys import DAMAGED, VERIFIED, attempt_prefix
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline.gc.collect import Removal, collect
from checkpointd.pipeline.root import catalog, epochs
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.latest import move_latest_away
from checkpointd.pipeline.root.marks import DIRECTORY_REMOVED
from checkpointd.pipeline.root.tag_directories import abandoned
from checkpointd.store.base import Store


@dataclass(frozen=True, slots=True)
class Retired:
    """What went, by which choice, and the attempts that lay there undecided."""

    removed: Sequence[Removal]
    choice: RemovalChoice
    undecided: Sequence[AttemptFacts]


async def retire(store: Store, views: Sequence[AttemptView], rules: Retention, *, keeps_before: int = 0) -> Retired:
    """Remove what is dead among `views`, for a job that knows what was committed from epoch `keeps_before` on."""
    choice = await chosen_by(store, views, rules, keeps_before=keeps_before)
    gone = await abandoned(store)
    deleted = [(v.facts, DIRECTORY_REMOVED) for v in views if v.prefix in gone and v.state == "committed"]
    going = [dead for dead in choice.going if attempt_prefix(dead[0].tag, dead[0].attempt) not in gone]
    lost = {facts for facts, _ in [*going, *deleted]}
    staying = catalog.commits_of(view for view in views if view.facts not in lost)
    removed = await collect(store, [view.facts for view in views], going, deleted=deleted, staying=staying)
    for facts, _ in deleted:
        await move_latest_away(store, facts.tag)
    return Retired(removed, choice, [v.facts for v in views if v.state == "in-doubt" and v.facts.bulk])


async def retire_tag(store: Store, tag: str, epoch: int) -> None:
    """Remove what is dead of one tag, for whoever has decided an attempt of `epoch`; nothing where a newer one has begun
    (COLLECT-5), and nothing that was committed before it (RETENTION-6).
    """
    if await epochs.newest(store) == epoch:
        await retire(store, await catalog.attempts_of(store, tag), Retention(), keeps_before=epoch)


async def chosen_by(store: Store, views: Sequence[AttemptView], rules: Retention, *, keeps_before: int = 0) -> RemovalChoice:
    """Which of the checkpoints among `views` go."""
    return choose(await facts_of(store, views), rules, keeps_before=keeps_before)


async def facts_of(store: Store, views: Sequence[AttemptView]) -> list[CheckpointFacts]:
    """What is known of every commit among `views`."""
    pointer = await _pointer(store)
    newest = {c.tag: c.attempt for c in catalog.checkpoints_of(views)}
    return [
        CheckpointFacts(
            attempt=view.facts,
            order=view.outcome.order,
            step=view.outcome.step,
            save_latest=view.outcome.save_latest,
            is_latest=view.tag == pointer and view.attempt == newest[view.tag],
            verified=VERIFIED in view.sizes,
            damaged=DAMAGED in view.sizes,
            passed_over=view.passed_over,
            age_s=_age_s(view.outcome),
            metrics=view.outcome.metrics,
        )
        for view in views
        if view.state == "committed" and view.outcome is not None
    ]


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
