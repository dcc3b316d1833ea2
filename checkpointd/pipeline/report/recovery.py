"""Recovery from the command line: whether it may take a root over, what it would decide, and what it did."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

import msgspec

from checkpointd.commit.retention import dead_weight
from checkpointd.errors import DamagedError, UsageError
from checkpointd.layout.manifest import Outcome
from checkpointd.pipeline import catalog, epochs
from checkpointd.pipeline.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.recover import judge, recover
from checkpointd.pipeline.report.holder import Holder, newest_holder
from checkpointd.pipeline.report.pointer import pointer
from checkpointd.store.base import Store

NO_RANKS = 0
"""The world size of an epoch that no job runs in: it fences the older ones, and the next start takes the one after it."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt that was in doubt, and what became of it."""

    tag: str
    attempt: str
    outcome: Literal["commit", "abort"]
    why: str


class RecoveryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a recovery did, or with `dry_run` would do; `epoch` is the one that it took, `holder` who ran the one before."""

    root: str
    dry_run: bool
    epoch: int | None
    holder: Holder | None
    refused: str = ""
    """Dry run only: why the recovery itself would be refused."""
    decided: tuple[Decided, ...]
    latest_moved_to: str | None
    swept: int
    """Attempts whose chunks and indexes went."""
    strays: int | None
    """Files of interrupted writes that went; None in a dry run."""


async def recovery(store: Store, *, force: bool = False) -> RecoveryReport:
    """Take the next epoch and decide every attempt of the older ones. UsageError where the job may still run."""
    holder = await _holder(store)
    why = refusal(holder, force=force)
    if why:
        raise UsageError(why)
    if holder is None and not await catalog.scan(store):
        # No job ever ran here: it may be any directory, and must not become a root by a slip.
        return RecoveryReport(
            root=store.url, dry_run=False, epoch=None, holder=None, decided=(), latest_moved_to=None, swept=0, strays=0
        )
    epoch = await epochs.take(store, NO_RANKS)
    done = await recover(store, epoch.epoch)
    return RecoveryReport(
        root=store.url,
        dry_run=False,
        epoch=epoch.epoch,
        holder=holder if isinstance(holder, Holder) else None,
        decided=_decided(done.decided),
        latest_moved_to=done.latest_moved_to,
        swept=done.swept,
        strays=done.strays,
    )


async def preview(store: Store, *, force: bool = False) -> RecoveryReport:
    """What `recovery` would do now; nothing is written."""
    holder = await _holder(store)
    attempts = await catalog.scan(store)
    outcomes = {a.prefix: await judge(store, a) for a in attempts if a.state == "in-doubt"}
    after = [_as_decided(a, outcomes.get(a.prefix)) for a in attempts]
    return RecoveryReport(
        root=store.url,
        dry_run=True,
        epoch=None,
        holder=holder if isinstance(holder, Holder) else None,
        refused=refusal(holder, force=force) or "",
        decided=_decided(outcomes.values()),
        latest_moved_to=await _next_latest(store, catalog.checkpoints_of(after)),
        swept=len(dead_weight([a.facts for a in after])),
        strays=None,
    )


def refusal(holder: Holder | DamagedError | None, *, force: bool) -> str | None:
    """Why the root must not be taken over from `holder`, or None."""
    if isinstance(holder, DamagedError):
        return None if force else f"who runs this root cannot be read ({holder}): see that no job does, then add --force"
    if holder is None or holder.life == "ended":
        return None
    if holder.life == "running":
        return (
            f"{holder} has run epoch {holder.epoch} here since {holder.since} and still lives: recovering now would fence it, "
            "and every save of it would fail; it decides what is in doubt itself. To recover all the same, end it first"
        )
    if force or not holder.is_job:
        return None
    return (
        f"the job on {holder.host} cannot be checked from here (process {holder.pid}, epoch {holder.epoch}, begun at "
        f"{holder.since}): see that it has ended, then add --force; a job that still runs would be fenced"
    )


async def _holder(store: Store) -> Holder | DamagedError | None:
    try:
        return await newest_holder(store)
    except DamagedError as error:
        return error


def _decided(outcomes: Iterable[Outcome]) -> tuple[Decided, ...]:
    return tuple(
        Decided(
            tag=outcome.tag,
            attempt=outcome.attempt,
            outcome=outcome.outcome,
            why=outcome.error.message if outcome.error else "every rank had voted yes, and all that was voted for is there",
        )
        for outcome in outcomes
    )


def _as_decided(attempt: AttemptView, outcome: Outcome | None) -> AttemptView:
    return attempt if outcome is None else replace(attempt, outcome=outcome)


async def _next_latest(store: Store, checkpoints: list[Checkpoint]) -> str | None:
    """Where `latest` would move; None where it stays."""
    due = next((c.tag for c in checkpoints if c.outcome.save_latest), None)
    return due if (await pointer(store, checkpoints)).problem else None
