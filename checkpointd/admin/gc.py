"""Collections and deletions, real or only planned, with reports for the command line and its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.commit.retention import Retention
from checkpointd.errors import NotFoundError, StoreError, UsageError
from checkpointd.layout.log_records import LoggedAttempt
from checkpointd.pipeline.gc.collect import DELETED_BY_NAME, DELETED_WITH_TAG, Removal, remove, survey, sweep
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.retire import by_reason, chosen_by, retired
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.read.readback import survivor
from checkpointd.pipeline.root import reserve, root_view
from checkpointd.pipeline.root.latest import move_latest
from checkpointd.pipeline.root.log import RootLog
from checkpointd.pipeline.root.wholeness import missing_of
from checkpointd.report.log import sound_state
from checkpointd.store.base import Store


class CollectionReport(msgspec.Struct, frozen=True, kw_only=True):
    """The attempts that were removed, or would be with `dry_run`. `retired` has the tags that are not checkpoints any more."""

    root: str
    dry_run: bool
    retired: tuple[str, ...]
    removed: tuple[Removal, ...]
    freed_bytes: int
    kept_bytes: int
    latest_moved_to: str | None = None
    needed_by: tuple[str, ...] = ()
    """For a deletion: the tags of newer checkpoints that refer to objects of the deleted one, so that these objects stay."""
    unproved: tuple[str, ...] = ()
    """Tags that no rule keeps, but that stay, since no checkpoint that the rules keep could be read back whole."""
    exporting: tuple[str, ...] = ()
    """Tags that no rule keeps, but that stay, since exports need them."""
    uploads: tuple[str, ...] = ()
    """The objects whose uploads killed writers had left unfinished, and that were aborted."""


async def collection(store: Store, rules: Retention, *, dry_run: bool) -> CollectionReport:
    """Remove leftovers, and the checkpoints that no rule keeps. UsageError if no checkpoint has the metric of the rules,
    DamagedError if the log cannot be read to its end.
    """
    return await reserve.on_full_disk(store, lambda: _collected(store, rules, dry_run=dry_run))


async def _collected(store: Store, rules: Retention, *, dry_run: bool) -> CollectionReport:
    leases = ExportLeases(store)
    await leases.settle()
    state = await sound_state(store)
    attempts = state.attempts.values()
    choice = await chosen_by(store, attempts, rules, exports=leases)
    if choice.unknown_metric is not None and root_view.checkpoints_of(attempts):
        raise UsageError(f"nothing was removed at {store.url}: {choice.unknown_metric}")
    chosen = [*choice.going, *choice.abandoned]
    if dry_run:
        gone = [prefix for prefix, _ in chosen]
        removals = await survey(store, state, by_reason(chosen))
    else:
        gone = await retired(store, attempts, choice.going, choice.abandoned)
        removals = await sweep(store)
        await RootLog.of(store).compact()
    report = _report(store, attempts, gone, removals, dry_run=dry_run)
    return msgspec.structs.replace(
        report,
        unproved=tuple(_tag(prefix) for prefix, _ in chosen if prefix not in gone),
        exporting=tuple(map(_tag, choice.exporting)),
        uploads=tuple(upload.key for upload in await abort_dead_uploads(store, dry_run=dry_run)),
    )


def _tag(prefix: str) -> str:
    return prefix.rpartition("/")[0]


async def deletion(store: Store, tag: str, *, force: bool, dry_run: bool) -> CollectionReport:
    """Remove the checkpoint `tag`. NotFoundError if there is none; UsageError if it is what a restart would load and not
    `force`; DamagedError if the log cannot be read to its end.
    """
    state = await sound_state(store)
    attempts = state.attempts.values()
    checkpoints = root_view.checkpoints_of(attempts)
    found = next((c for c in checkpoints if c.tag == tag), None) or await root_view.find(store, tag)  # which says what is there
    if not force and await _is_indispensable(store, checkpoints, found):
        anyway = command("delete", *at_tag(store.url, tag), "--force")
        raise UsageError(
            f"{tag} is the newest checkpoint that can be loaded: a restart would load an older one, or none; to delete it "
            f"anyway: {anyway}, or force=True in Python"
        )
    # Otherwise an older commit of the tag that is not collected yet would become its checkpoint.
    others = [one.prefix for one in attempts if one.tag == tag and one.status == "checkpoint" and one.prefix != found.prefix]
    going = {DELETED_BY_NAME: [found.prefix], DELETED_WITH_TAG: others}
    own = {one.prefix for one in attempts if one.tag == tag}
    gone, moved = [found.prefix, *others], None
    if dry_run:
        removals = [one for one in await survey(store, state, going) if one.tag == tag]
    else:
        if refused := await reserve.on_full_disk(store, lambda: remove(store, going)):
            raise NotFoundError(f"nothing was removed, since {tag} has changed meanwhile: {refused}")
        moved = await reserve.on_full_disk(store, lambda: _moved(store))
        failed: list[StoreError] = []
        removals = await reserve.on_full_disk(store, lambda: sweep(store, own, failed=failed))
        if failed:
            raise failed[0]
    needed_by = tuple(c.tag for c in checkpoints if c.tag != tag and not own.isdisjoint(c.commit.holders))
    report = _report(store, attempts, gone, removals, dry_run=dry_run)
    return msgspec.structs.replace(report, latest_moved_to=moved, needed_by=needed_by)


async def _moved(store: Store) -> str | None:
    """Move `latest`. Returns the tag that it names now, if that is another one."""
    before = await root_view.readable_latest(store)
    after = await move_latest(RootLog.of(store))
    return after if after != before else None


async def delete_once(store: Store, tag: str, *, force: bool) -> None:
    """As `deletion`, for a job whose ranks may all call it: does nothing if somebody has already deleted `tag` by name."""
    try:
        await deletion(store, tag, force=force, dry_run=False)
    except NotFoundError:
        known = (await root_view.state_of(store)).attempts.values()
        removals = [one.removal for one in known if one.tag == tag and one.removal is not None]
        if not any(removal.reason == DELETED_BY_NAME for removal in removals):
            raise


async def delete_if_survived(store: Store, tag: str) -> bool:
    """Delete `tag` if a checkpoint that stays is read back whole (READBACK-3), or if there is no other. Whether it is gone."""
    checkpoints = await root_view.checkpoints(store)
    others = [checkpoint for checkpoint in checkpoints if checkpoint.tag != tag]
    if len(others) == len(checkpoints):
        return True
    if others and await survivor(store, others) is None:
        return False
    await delete_once(store, tag, force=True)
    return True


async def _is_indispensable(store: Store, checkpoints: Sequence[LoggedAttempt], found: LoggedAttempt) -> bool:
    """Whether a restart would load `found`."""
    for checkpoint in checkpoints:
        if checkpoint.may_be_latest and await missing_of(store, checkpoint) is None:
            return checkpoint.prefix == found.prefix
    return False


def _report(
    store: Store, attempts: Iterable[LoggedAttempt], gone: Sequence[str], removals: Sequence[Removal], *, dry_run: bool
) -> CollectionReport:
    left = {c.tag for c in root_view.checkpoints_of(one for one in attempts if one.prefix not in gone)}
    return CollectionReport(
        root=store.url,
        dry_run=dry_run,
        retired=tuple(tag for tag in dict.fromkeys(map(_tag, gone)) if tag not in left),
        removed=tuple(removals),
        freed_bytes=sum(removal.freed_bytes for removal in removals),
        kept_bytes=sum(removal.kept_bytes for removal in removals),
    )
