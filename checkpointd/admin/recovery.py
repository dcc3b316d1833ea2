"""Recovery from the command line: a preview of its decisions, or the recovery itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

import msgspec

from checkpointd.commands import command
from checkpointd.commit.garbage import dead_weight
from checkpointd.errors import DamagedError
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline.outcome.recover import judge, lost, recover
from checkpointd.pipeline.root import catalog, leases, reserve, starts
from checkpointd.pipeline.root.catalog import AttemptView
from checkpointd.pipeline.root.leases import Beginner
from checkpointd.report.holder import Holder, newest_holder
from checkpointd.report.latest import pointer
from checkpointd.store.base import Store
from checkpointd.store.conditions import check_conditions_of

log = logging.getLogger("checkpointd")

NO_RANKS = 0
"""The world size of a start without a job. It fences older starts, and the next one takes the number after it."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that was in doubt, and its outcome."""

    tag: str
    attempt: str
    outcome: Literal["commit", "abort"]
    why: str


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """The actions of a recovery, real or with `dry_run` planned. It took `start`; `holder` held the start before."""

    root: str
    dry_run: bool
    start: int | None
    holder: Holder | None
    refused: str = ""
    """Only in a dry run: why the recovery itself would be refused."""
    decided: tuple[Decided, ...]
    surviving: tuple[str, ...] = ()
    """Undecided attempts (`<tag>/<attempt>`) that stay undecided because daemons still work at them."""
    latest_moved_to: str | None
    latest_removed: bool = False
    """`latest` named a tag that is gone, and no checkpoint is left for it to name."""
    swept: int
    """The number of attempts whose chunks and indexes were removed."""
    strays: int | None
    """The number of removed files of interrupted writes; None in a dry run."""


async def recovery(store: Store, *, take_over: bool = False) -> RecoveryReport:
    """Take the next start and decide every attempt of older starts, except those that a daemon still works at.

    RootInUseError if a job is alive at the root, unless `take_over`.
    """
    return await reserve.on_full_disk(store, lambda: _recovered(store, take_over=take_over))


async def _recovered(store: Store, *, take_over: bool) -> RecoveryReport:
    holder = await _holder(store)
    if holder is None and not await starts.newest(store) and not await catalog.scan(store):
        # No job ever ran here. This may be any directory, and must not become a root by mistake.
        return RecoveryReport(
            root=store.url, dry_run=False, start=None, holder=None, decided=(), latest_moved_to=None, swept=0, strays=0
        )
    await check_conditions_of(store, new=False)
    start, lease = await leases.begin(store, beginner_of(store, take_over=take_over))
    try:
        done = await recover(store, start.start, start.surviving, accepts_loss=True)
    finally:
        await lease.release()
    return RecoveryReport(
        root=store.url,
        dry_run=False,
        start=start.start,
        holder=holder,
        decided=_decided(done.decided),
        surviving=start.surviving,
        latest_moved_to=done.latest_moved_to,
        latest_removed=done.latest_removed,
        swept=done.swept,
        strays=done.strays,
    )


def beginner_of(store: Store, *, take_over: bool, name: str = "recover", at: Sequence[str] = ()) -> Beginner:
    """A start without a job, for the command `name`. `at`: its arguments after the root."""
    return Beginner(
        world_size=NO_RANKS,
        take_over=take_over,
        instead=(
            "That job decides its saves itself. To do this nevertheless, end the job first, or take the root over, so that all "
            f"its later saves fail: {command(name, store.url, *at, '--take-over')}"
        ),
    )


async def preview(store: Store, *, take_over: bool = False) -> RecoveryReport:
    """The report that `recovery` would give now; nothing is written."""
    beginner = beginner_of(store, take_over=take_over)
    surviving, living = await asyncio.gather(
        leases.attempts_at_work(store, beginner.sight), leases.living_job(store, beginner.job, beginner.sight)
    )
    surviving = await starts.unfenced(store, surviving)
    attempts = await catalog.scan(store)
    outcomes = {
        a.prefix: (await judge(store, a)).outcome for a in attempts if a.state == "in-doubt" and a.prefix not in surviving
    }
    after = [_as_decided(a, outcomes.get(a.prefix)) for a in attempts]
    due = next((c.tag for c in catalog.checkpoints_of(after) if c.may_be_latest), None)
    problem = (await pointer(store, catalog.checkpoints_of(after))).problem
    return RecoveryReport(
        root=store.url,
        dry_run=True,
        start=None,
        holder=await _holder(store),
        refused=leases.refusal(store, living, beginner.instead) if living is not None and not take_over else "",
        decided=_decided(outcomes.values()),
        surviving=surviving,
        latest_moved_to=due if problem else None,
        latest_removed=bool(problem) and due is None and await lost(store, catalog.checkpoints_of(after)) is not None,
        swept=len(dead_weight([a.facts for a in after if a.prefix not in surviving])),
        strays=None,
    )


async def _holder(store: Store) -> Holder | None:
    try:
        return await newest_holder(store)
    except DamagedError as error:
        log.warning("the record of this root's job cannot be read: %s", error)
        return None


def _decided(outcomes: Iterable[Outcome]) -> tuple[Decided, ...]:
    return tuple(
        Decided(
            tag=outcome.tag,
            attempt=outcome.attempt,
            outcome=outcome.outcome,
            why=outcome.error.message
            if outcome.error
            else "every rank had voted yes, and all objects that the votes name are there",
        )
        for outcome in outcomes
    )


def _as_decided(attempt: AttemptView, outcome: Outcome | None) -> AttemptView:
    return attempt if outcome is None else replace(attempt, outcome=outcome)
