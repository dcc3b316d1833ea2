"""Retires checkpoints, by rules or because their tag was saved again: `commit/retention.py` chooses, `collect.py` removes.

This is safe beside saves and loads at the root: a retired checkpoint is not the newest, the log records its removal first, and
objects that newer checkpoints need stay (`collect.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from checkpointd.commit.branches import commits_of
from checkpointd.commit.facts import Dead, Order
from checkpointd.commit.retention import KEEPS_NONE, RemovalChoice, Retention, choose
from checkpointd.errors import StoreError
from checkpointd.layout.log_records import CommitRecord, LoggedAttempt
from checkpointd.pipeline.gc.collect import DIRECTORY_REMOVED, Kept, Removal, remove, sweep
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.read.readback import read_back, survivor
from checkpointd.pipeline.root import root_view, starts
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.wholeness import missing
from checkpointd.store.base import Store

log = logging.getLogger("checkpointd")


async def retire(
    store: Store,
    attempts: Collection[LoggedAttempt],
    rules: Retention,
    *,
    start: int = 0,
    keeps_before: Order = KEEPS_NONE,
    exports: ExportLeases | None = None,
    kept: Kept | None = None,
) -> Sequence[Removal]:
    """Remove the checkpoints among `attempts` that the rules do not keep, and what is left of aborted attempts. Those before
    `keeps_before` stay (RETENTION-6), and so do those that `exports` need (RETENTION-7). `start`: the start for which this is;
    0 for a person. `kept`: as for `sweep`. Returns the removals.
    """
    choice = await chosen_by(store, attempts, rules, keeps_before=keeps_before, exports=exports)
    await retired(store, attempts, choice.going, choice.abandoned, start)
    failed: list[StoreError] = []
    removed = await sweep(store, failed=failed, kept=kept)
    if failed:
        words = "objects of attempts (%d) at %s could not be removed: %s; the next removal tries again"
        log.warning(words, len(failed), store.url, failed[0])
    return removed


async def retired(
    store: Store, attempts: Collection[LoggedAttempt], going: Sequence[Dead], abandoned: Sequence[Dead] = (), start: int = 0
) -> list[str]:
    """Record that the checkpoints `going` and `abandoned` among `attempts` are none any more; returns which. None of `going`
    goes unless one that stays was read back whole (READBACK-3); if none was, one is read back now.
    """
    gone = {prefix for prefix, _ in (*going, *abandoned)}
    staying = commits_of(one for one in attempts if one.prefix not in gone)
    if going and await survivor(store, staying) is None:
        log.error("%d older checkpoints stay, since none of the newer ones could be read back whole", len(going))
        going = ()
    taken: list[str] = []
    for some, by in ((going, start), (abandoned, 0)):
        if refused := await remove(store, by_reason(some), by):
            log.warning("%d checkpoints at %s stay for now: %s", len(some), store.url, refused)
        else:
            taken += [prefix for prefix, _ in some]
    if abandoned:
        await move_latest(RootLog.of(store))
    return taken


def by_reason(going: Iterable[Dead]) -> dict[str, list[str]]:
    """The same checkpoints (`<tag>/<attempt>`) by the reason."""
    found: dict[str, list[str]] = {}
    for prefix, reason in going:
        found.setdefault(reason, []).append(prefix)
    return found


async def retire_tag(store: Store, tag: str, start: int) -> None:
    """Remove the checkpoints of one tag that were saved again, for a process that has decided an attempt of `start`.

    If there is a newer start, nothing goes. Checkpoints of older starts stay (RETENTION-6).
    """
    if await starts.newest(store) == start:
        attempts = root_view.attempts_of(await root_view.state_of(store), tag)
        await retire(store, attempts, Retention(), start=start, keeps_before=(start, 0), exports=ExportLeases(store))


async def prove_newest(store: Store, bytes_max: int | None = None) -> bool:
    """Read the newest checkpoint back, unless it stores more than `bytes_max`. Returns whether it was read and is whole."""
    newest = next(iter(await root_view.checkpoints(store)), None)
    if newest is None or (bytes_max is not None and _stored_bytes(newest.commit) > bytes_max):
        return False
    return (await read_back(store, newest)).whole


def _stored_bytes(commit: CommitRecord) -> float:
    return math.inf if commit.cost is None else commit.cost.stored_bytes


async def chosen_by(
    store: Store,
    attempts: Collection[LoggedAttempt],
    rules: Retention,
    *,
    keeps_before: Order = KEEPS_NONE,
    exports: ExportLeases | None = None,
) -> RemovalChoice:
    """Choose the checkpoints among `attempts` to remove. Those count of which one listing of the root shows nothing to be
    missing (RETENTION-9). `exports`: keep those that exports need.
    """
    attempts = list(attempts)
    losses = await missing(store, commits_of(attempts))
    gone = {prefix for prefix, lost in losses.items() if lost.is_removed}
    there = [one for one in attempts if one.prefix not in gone]
    choice = choose(there, rules, age_s=age_s, keeps_before=keeps_before, incomplete=losses)
    if exports is not None and (choice.going or choice.surplus):
        exporting = await exports.kept(attempts)
        choice = choose(there, rules, age_s=age_s, keeps_before=keeps_before, incomplete=losses, exporting=exporting)
    return replace(choice, abandoned=tuple((prefix, DIRECTORY_REMOVED) for prefix in sorted(gone)))


def age_s(commit: CommitRecord) -> float:
    """The seconds since the commit, by two clocks that may differ; 0 if its time cannot be read."""
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(commit.writer.time)).total_seconds()
    except (ValueError, TypeError):
        return 0.0
