"""Goes back to an older checkpoint, from which the next start of the job goes on. The ones after it stay, left behind."""

from __future__ import annotations

import msgspec

from checkpointd.admin.recovery import beginner_of
from checkpointd.commands import at_tag, command
from checkpointd.errors import DamagedError, NotFoundError, RootInUseError, UsageError
from checkpointd.layout.keys import AttemptId, check_tag
from checkpointd.phrases import listed
from checkpointd.pipeline.outcome import branches
from checkpointd.pipeline.outcome.branches import Branching
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import catalog, leases, reserve, starts
from checkpointd.pipeline.root.catalog import Checkpoint
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.tag_directories import point_at
from checkpointd.store.base import Store
from checkpointd.store.conditions import check_conditions_of


class RollbackReport(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a start loads next, and what that changes for others (`<tag>/<attempt>`, newest first)."""

    root: str
    dry_run: bool
    tag: str
    step: int
    left_behind: tuple[str, ...]
    """They came after it, and are of a branch that was left from now on."""
    current: tuple[str, ...] = ()
    """They were of a branch that was left, and are no longer."""


async def rollback(
    store: Store, tag: str, *, attempt: str | None = None, take_over: bool = False, dry_run: bool = False
) -> RollbackReport:
    """Let loads, readers and later starts go on from the checkpoint `tag`. Removes nothing, and can be undone by going back to
    one of those that are left behind. `attempt`: which one, if two branches have saved the tag; by default the current one's.

    Decides the saves of earlier jobs first. Raises NotFoundError if there is no such checkpoint, DamagedError if it is recorded
    as damaged, RootInUseError if a job or a daemon is at work at the root; with `take_over` all later saves of that job fail.
    """
    chosen = await _chosen(store, check_tag(tag), attempt)
    if dry_run:
        return _report(store, chosen, branches.planned(await catalog.scan(store), chosen.outcome, beyond=True), dry_run=True)
    return await reserve.on_full_disk(store, lambda: _gone_back(store, chosen, take_over=take_over))


async def _gone_back(store: Store, chosen: Checkpoint, *, take_over: bool) -> RollbackReport:
    tag = chosen.tag
    beginner = beginner_of(store, take_over=take_over, name="rollback", at=(tag,))
    working = await starts.unfenced(store, await leases.attempts_at_work(store, beginner.sight))
    if working:
        raise RootInUseError(
            f"nothing has changed at {store.url}: a daemon still works at {listed(working)}, which would be the newest "
            f"checkpoint. Wait until it has ended, and repeat {command('rollback', *at_tag(store.url, tag))}"
        )
    await check_conditions_of(store, new=False)
    start, lease = await leases.begin(store, beginner)
    try:
        await recover(store, start.start, start.surviving, accepts_loss=True)
        chosen = await _chosen(store, tag, str(chosen.attempt))  # it may have been removed meanwhile
        change = await branches.leave_behind(store, chosen.outcome, beyond=True)
        await move_latest(store, tag, chosen.outcome.order)
        await point_at(store, chosen.outcome)
    finally:
        await lease.release()
    return _report(store, chosen, change, dry_run=False)


async def _chosen(store: Store, tag: str, attempt: str | None) -> Checkpoint:
    chosen = await (catalog.find(store, tag) if attempt is None else _named(store, tag, attempt))
    if chosen.read_back == "damaged":
        looks = command("verify", *at_tag(store.url, tag))
        raise DamagedError(
            f"{tag} at {store.url} is damaged by its record, so nothing can go on from it: {looks} reads it again",
            key=chosen.prefix,
        )
    return chosen


async def _named(store: Store, tag: str, attempt: str) -> Checkpoint:
    known = AttemptId.parse(attempt)
    if known is None:
        raise UsageError(f"there is no attempt {attempt!r}: {command('list', '--all', store.url)} shows them, as in 00000003-0")
    view = await catalog.view(store, tag, known)
    if (fault := catalog.fault_of(view)) is not None:
        raise fault
    if view.state != "committed" or view.outcome is None:
        raise NotFoundError(f"{view.prefix} at {store.url} is not a checkpoint: {command('explain', *at_tag(store.url, tag))}")
    return Checkpoint(tag, known, view.outcome, view.read_back, view.left_behind)


def _report(store: Store, chosen: Checkpoint, change: Branching, *, dry_run: bool) -> RollbackReport:
    return RollbackReport(
        root=store.url,
        dry_run=dry_run,
        tag=chosen.tag,
        step=chosen.outcome.step,
        left_behind=change.left,
        current=change.current,
    )
