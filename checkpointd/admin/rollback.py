"""Goes back to an older checkpoint, from which the next start of the job goes on. The ones after it stay, left behind."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import msgspec

from checkpointd.admin.recovery import beginner_of
from checkpointd.commands import at_tag, command
from checkpointd.commit.branches import BranchChange, commits_of
from checkpointd.commit.log import apply
from checkpointd.errors import DamagedError, NotFoundError, RootInUseError, UsageError
from checkpointd.layout.keys import AttemptId, attempt_prefix, check_tag
from checkpointd.layout.log_records import LoggedAttempt, LogState, RollbackRecord
from checkpointd.phrases import listed
from checkpointd.pipeline.identity import user, writer
from checkpointd.pipeline.outcome import starting
from checkpointd.pipeline.outcome.recover import recover
from checkpointd.pipeline.root import leases, reserve, root_view, starts
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.tag_directories import point_at
from checkpointd.report.log import sound_state
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

    Decides the saves of earlier jobs first. Raises NotFoundError if there is no such checkpoint, UsageError if it was saved
    with save_latest=False, DamagedError if it is recorded as damaged or if the log cannot be read to its end, RootInUseError if
    a job or a daemon is at work at the root; with `take_over` all later saves of that job fail.
    """
    state = await sound_state(store)
    chosen = _chosen(store, state, check_tag(tag), attempt)
    if dry_run:
        return _report(store, chosen, _change(state, apply(state, _record(chosen))), dry_run=True)
    return await reserve.on_full_disk(store, lambda: _gone_back(store, chosen, take_over=take_over))


async def _gone_back(store: Store, chosen: LoggedAttempt, *, take_over: bool) -> RollbackReport:
    tag = chosen.tag
    beginner = beginner_of(store, take_over=take_over, name="rollback", at=(tag,))
    working = await starts.unfenced(store, await leases.attempts_at_work(store, beginner.sight))
    if working:
        raise RootInUseError(
            f"nothing has changed at {store.url}: a daemon still works at {listed(working)}, which would be the newest "
            f"checkpoint. Wait until it has ended, and repeat {command('rollback', *at_tag(store.url, tag))}"
        )
    await check_conditions_of(store, new=False)

    def admits(before: LogState) -> None:
        _chosen(store, before, tag, str(chosen.id))  # it may have been removed meanwhile

    # In one entry with the begin: so a reply that is lost leads to no second one, which might leave behind what came since.
    taken = await starting.begin(store, replace(beginner, admits=admits, then=(_record(chosen),)))
    try:
        log = RootLog.of(store)
        change = _change(taken.before, log.state)
        await move_latest(log)
        await recover(store, taken.before)
        await point_at(store, chosen.commit)
    finally:
        await taken.lease.release()
    return _report(store, chosen, change, dry_run=False)


def _record(chosen: LoggedAttempt) -> RollbackRecord:
    return RollbackRecord(attempt=chosen.prefix, user=user(), writer=writer())


def _change(before: LogState, after: LogState) -> BranchChange:
    was_left = {one.prefix for one in before.attempts.values() if one.left_behind}
    newest_first = sorted(after.attempts.values(), key=attrgetter("order"), reverse=True)
    there = [one for one in newest_first if one.status == "checkpoint"]
    return BranchChange(
        left=tuple(one.prefix for one in there if one.left_behind and one.prefix not in was_left),
        current=tuple(one.prefix for one in there if not one.left_behind and one.prefix in was_left),
    )


def _chosen(store: Store, state: LogState, tag: str, attempt: str | None) -> LoggedAttempt:
    known = None if attempt is None else AttemptId.parse(attempt)
    if attempt is not None and known is None:
        raise UsageError(f"there is no attempt {attempt!r}: {command('list', '--all', store.url)} shows them, as in 00000003-0")
    found = [one for one in root_view.attempts_of(state, tag) if known in (None, one.id)]
    chosen = next(iter(commits_of(found)), None)
    if chosen is None:
        what = tag if known is None else attempt_prefix(tag, known)
        says = command("explain", *at_tag(store.url, tag)) if found else command("list", store.url)
        raise NotFoundError(f"{what} at {store.url} is not a checkpoint: {says} says more")
    if chosen.read_back == "damaged":
        looks = command("verify", *at_tag(store.url, tag))
        raise DamagedError(
            f"{tag} at {store.url} is damaged by its record, so nothing can go on from it: {looks} reads it again",
            key=chosen.prefix,
        )
    if not chosen.commit.save_latest:
        raise UsageError(
            f"{tag} was saved with save_latest=False, so no load takes it unless it names it: let the job load this tag by "
            "name, and its first commit leaves behind what came after it"
        )
    return chosen


def _report(store: Store, chosen: LoggedAttempt, change: BranchChange, *, dry_run: bool) -> RollbackReport:
    return RollbackReport(
        root=store.url,
        dry_run=dry_run,
        tag=chosen.tag,
        step=chosen.commit.step,
        left_behind=change.left,
        current=change.current,
    )
