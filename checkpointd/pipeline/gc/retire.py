"""Retires checkpoints, by rules or because their tag was saved again: `commit/retention.py` chooses, `collect.py` removes.

This is safe beside saves and loads at the root: a retired checkpoint is not the newest, it gets its mark first, and objects
that newer checkpoints need stay (`collect.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from checkpointd.commit.facts import Order
from checkpointd.commit.retention import KEEPS_NONE, CheckpointFacts, RemovalChoice, Retention, choose
from checkpointd.errors import StoreError
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline.gc.collect import Removal, collect
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.read.readback import read_back
from checkpointd.pipeline.root import catalog, starts
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.latest import move_latest_away
from checkpointd.pipeline.root.marks import DIRECTORY_REMOVED
from checkpointd.pipeline.root.wholeness import Wholeness, lost_text
from checkpointd.pipeline.workers import uncollected
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


@dataclass(frozen=True, slots=True)
class Retired:
    """The removals, and the choice behind them. `is_complete`: whether no removal failed."""

    removed: Sequence[Removal]
    choice: RemovalChoice
    is_complete: bool


async def retire(
    store: Store,
    views: Sequence[AttemptView],
    rules: Retention,
    *,
    keeps_before: Order = KEEPS_NONE,
    exports: ExportLeases | None = None,
    known: CatalogLog | None = None,
    thorough: bool = True,
) -> Retired:
    """Remove dead attempts among `views`. Checkpoints before `keeps_before` stay (RETENTION-6), and so do those that `exports`
    need (RETENTION-7). `known`: the catalog as this process has read it. `thorough`: see `collect`.
    """
    choice = await chosen_by(store, views, rules, keeps_before=keeps_before, exports=exports)
    going, deleted = choice.going, choice.abandoned
    lost = {facts.prefix for facts, _ in [*going, *deleted]}
    staying = catalog.commits_of(view for view in views if view.read_back == "whole" and view.prefix not in lost)
    found, failed = [view.facts for view in views], list[StoreError]()
    removed = await collect(
        store, found, going, deleted=deleted, staying=staying, known=known, thorough=thorough, failed=failed
    )
    if failed:
        words = "objects of attempts (%d) at %s could not be removed: %s; the next removal tries again"
        log.warning(words, len(failed), store.url, failed[0])
    for facts, _ in deleted:
        await move_latest_away(store, facts.tag)
    return Retired(removed, choice, not failed)


async def retire_tag(store: Store, tag: str, start: int) -> None:
    """Remove dead attempts at one tag, for a process that has decided an attempt of `start`.

    If there is a newer start, nothing goes (COLLECT-5). Checkpoints of older starts stay (RETENTION-6).
    """
    if await starts.newest(store) == start:
        views = await catalog.attempts_of(store, tag)
        await retire(store, views, Retention(), keeps_before=(start, 0), exports=ExportLeases(store))


async def prove_newest(store: Store, bytes_max: int | None = None) -> bool:
    """Read the newest checkpoint back, unless it stores more than `bytes_max`. Returns whether it was read and is whole."""
    newest = next(iter(await catalog.checkpoints(store)), None)
    if newest is None or (bytes_max is not None and _stored_bytes(newest.outcome) > bytes_max):
        return False
    return (await read_back(store, newest)).whole


def _stored_bytes(outcome: Outcome) -> float:
    return math.inf if outcome.cost is None else outcome.cost.stored_bytes


async def chosen_by(
    store: Store,
    views: Sequence[AttemptView],
    rules: Retention,
    *,
    keeps_before: Order = KEEPS_NONE,
    exports: ExportLeases | None = None,
    looks: bool = True,
) -> RemovalChoice:
    """Choose the checkpoints among `views` to remove. Only those count that can be loaded, by a look at what is there
    (RETENTION-9). `exports`: keep those that exports need. Without `looks`, nothing counts as missing.
    """
    wholeness = Wholeness(store, views)
    gone = await wholeness.abandoned()
    pointer = await catalog.readable_latest(store)
    of_pointer = (view for view in views if view.tag == pointer and view.order is not None)
    newest = max(of_pointer, key=lambda view: view.order or (0, 0), default=None)
    has_ages = rules.younger_than_s is not None
    commits = [
        CheckpointFacts(
            attempt=view.facts,
            order=view.outcome.order,
            step=view.outcome.step,
            save_latest=view.outcome.save_latest,
            is_latest=view is newest,
            verified=view.is_verified,
            damaged=view.read_back == "damaged",
            passed_over=view.passed_over,
            left_behind=view.left_behind,
            is_shown=bool(view.outcome.shown_at),
            age_s=_age_s(view.outcome) if has_ages else None,
            metrics=view.outcome.metrics,
        )
        for view in views
        if view.outcome is not None and view.state == "committed" and view.prefix not in gone
    ]
    abandoned = tuple((v.facts, DIRECTORY_REMOVED) for v in views if v.prefix in gone and v.state == "committed")

    def chosen() -> RemovalChoice:
        return uncollected(lambda: choose(commits, rules, keeps_before=keeps_before))

    choice = chosen()
    if exports is not None and (choice.going or choice.surplus):
        exporting = await exports.kept(views)
        commits = [replace(one, exporting=one.attempt.prefix in exporting) for one in commits]
        choice = chosen() if exporting else choice
    looked = set[str]()
    while unsure := [facts for facts in choice.relied_on if looks and facts.prefix not in looked]:
        looked |= {facts.prefix for facts in unsure}
        lost = {facts.prefix: await wholeness.lost_now(facts.tag, facts.attempt) for facts in unsure}
        incomplete = {prefix for prefix in lost if lost[prefix]}
        for prefix in incomplete:
            log.warning("%s does not count for retention: %s", prefix, lost_text(lost[prefix]))
        commits = [replace(one, incomplete=one.incomplete or one.attempt.prefix in incomplete) for one in commits]
        choice = chosen() if incomplete else choice
    return replace(choice, abandoned=abandoned)


def _age_s(outcome: Outcome) -> float | None:
    """The seconds since the commit, by two clocks that may differ. Only the choice among old checkpoints uses it."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(outcome.writer.time)).total_seconds()
    except (ValueError, TypeError):
        return None
