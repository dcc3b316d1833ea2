"""Collections and deletions, real or only planned, with reports for the command line and its JSON."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Sequence

import msgspec

from checkpointd.commands import at_tag, command
from checkpointd.commit.facts import Dead
from checkpointd.commit.retention import Retention
from checkpointd.errors import DamagedError, NotFoundError, StoreError, UsageError
from checkpointd.pipeline.gc.collect import Removal, collect, survey
from checkpointd.pipeline.gc.export_leases import ExportLeases
from checkpointd.pipeline.gc.retire import chosen_by
from checkpointd.pipeline.gc.uploads import abort_dead_uploads
from checkpointd.pipeline.read.readback import survivor
from checkpointd.pipeline.root import catalog, reserve, starts
from checkpointd.pipeline.root.catalog import AttemptView, Checkpoint
from checkpointd.pipeline.root.catalog_log import CatalogLog
from checkpointd.pipeline.root.catalog_mending import forget_gone
from checkpointd.pipeline.root.latest import move_latest_away
from checkpointd.pipeline.root.marks import DELETED_BY_NAME, removed_by_hand
from checkpointd.pipeline.root.wholeness import Wholeness
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
    """Remove leftovers, and the checkpoints that no rule keeps. UsageError if no checkpoint has the metric of the rules."""
    return await reserve.on_full_disk(store, lambda: _collected(store, rules, dry_run=dry_run))


async def _collected(store: Store, rules: Retention, *, dry_run: bool) -> CollectionReport:
    leases = ExportLeases(store)
    await leases.settle()
    views = await catalog.scan(store)
    choice = await chosen_by(store, views, rules, exports=leases)
    if choice.unknown_metric is not None and catalog.checkpoints_of(views):
        raise UsageError(f"nothing was removed at {store.url}: {choice.unknown_metric}")
    report = await _done(store, views, choice.going, deleted=choice.abandoned, dry_run=dry_run)
    if not dry_run:
        for facts, _ in choice.abandoned:
            await move_latest_away(store, facts.tag)
        await _forget_old(store)
    uploads = await abort_dead_uploads(store, CatalogLog(store), dry_run=dry_run)
    exporting = tuple(facts.tag for facts in choice.exporting)
    return msgspec.structs.replace(report, exporting=exporting, uploads=tuple(upload.key for upload in uploads))


async def _forget_old(store: Store) -> None:
    """Remove what a start would: records of old starts, and those of the catalog. If the newest start's record is damaged, the
    next start sees to it.
    """
    known, newest = CatalogLog(store), await starts.newest(store)
    await forget_gone(store, known)
    await known.refresh()
    await known.compact()
    try:
        await starts.remove_older(store, newest, (await starts.read(store, newest)).surviving, most=sys.maxsize)
    except (DamagedError, NotFoundError):
        return


async def deletion(store: Store, tag: str, *, force: bool, dry_run: bool) -> CollectionReport:
    """Remove the checkpoint `tag`. NotFoundError if there is none; UsageError if it is what a restart would load and not
    `force`.
    """
    views = [view for view in await catalog.scan(store) if view.tag != tag] + await catalog.attempts_of(store, tag)
    checkpoints = catalog.checkpoints_of(views)
    found = next((c for c in checkpoints if c.tag == tag), None)
    if found is None:
        try:
            await catalog.find(store, tag)  # raises an error that describes what is there
        except DamagedError as error:
            if any(view.is_copy for view in views if view.tag == tag):
                raise  # it says what to do with a copy
            raise DamagedError(
                f"nothing was removed: {error}. Bring {error.key} back from a copy, then delete {tag} again; without a copy, "
                f"remove the directory {store.url}/{tag} yourself, and let {command('verify', store.url)} tell whether a newer "
                "checkpoint needed it",
                key=error.key,
            ) from error
        raise NotFoundError(f"{tag} is not a checkpoint any more")
    why = "" if force else await _indispensable(store, views, found)
    if why:
        anyway = command("delete", *at_tag(store.url, tag), "--force")
        raise UsageError(
            f"{tag} is {why}: a restart would load an older one, or none; to delete it anyway: {anyway}, or force=True "
            "in Python"
        )
    deleted = [(view.facts, DELETED_BY_NAME) for view in views if view.prefix == found.prefix]
    # Otherwise an older commit of the tag that is not collected yet would become its checkpoint.
    deleted += [
        (v.facts, "its tag was deleted on request")
        for v in views
        if v.tag == tag and v.state == "committed" and v.prefix != found.prefix
    ]
    # Each step by itself: after the first one, a look from the start would not find the tag any more.
    own_views = [view for view in views if view.tag == tag]
    failed: list[StoreError] = []

    def remove() -> Awaitable[CollectionReport]:
        failed.clear()  # of a try that found the disk full
        return _done(store, own_views, deleted=deleted, dry_run=dry_run, failed=failed)

    report = await reserve.on_full_disk(store, remove)
    is_left = any(view.prefix == found.prefix and view.state == "committed" for view in await catalog.attempts_of(store, tag))
    moved = None if dry_run or is_left else await reserve.on_full_disk(store, lambda: move_latest_away(store, tag))
    if failed:
        raise failed[0]
    own = {view.prefix for view in own_views}
    needed_by = tuple(c.tag for c in checkpoints if c.tag != tag and not own.isdisjoint(c.outcome.holders))
    return msgspec.structs.replace(report, latest_moved_to=moved, needed_by=needed_by)


async def delete_once(store: Store, tag: str, *, force: bool) -> None:
    """As `deletion`, for a job whose ranks may all call it: does nothing if somebody has already deleted `tag` by name."""
    try:
        await deletion(store, tag, force=force, dry_run=False)
    except NotFoundError:
        if not await removed_by_hand(store, await catalog.attempts_of(store, tag)):
            raise


async def delete_if_survived(store: Store, tag: str) -> bool:
    """Delete `tag` if a checkpoint that stays is read back whole (READBACK-3), or if there is no other. Whether it is gone."""
    checkpoints = await catalog.checkpoints(store)
    others = [checkpoint for checkpoint in checkpoints if checkpoint.tag != tag]
    if len(others) == len(checkpoints):
        return True
    gone = await Wholeness(store).abandoned()
    if others and await survivor(store, [c for c in others if c.prefix not in gone]) is None:
        return False
    await delete_once(store, tag, force=True)
    return True


async def _indispensable(store: Store, views: Sequence[AttemptView], found: Checkpoint) -> str:
    """Why a restart would load `found`; empty if it would not."""
    wholeness = Wholeness(store, views)
    if found.prefix in await wholeness.abandoned():
        return ""
    if await catalog.readable_latest(store) == found.tag:
        return "what latest names"
    for checkpoint in catalog.checkpoints_of(views):
        if checkpoint.may_be_latest and not await wholeness.lost_now(checkpoint.tag, checkpoint.attempt):
            return "the newest checkpoint that can be loaded" if checkpoint.prefix == found.prefix else ""
    return ""


async def _done(
    store: Store,
    views: list[AttemptView],
    retired: Sequence[Dead] = (),
    *,
    deleted: Sequence[Dead] = (),
    dry_run: bool,
    failed: list[StoreError] | None = None,
) -> CollectionReport:
    """`failed`: as of `collect`."""
    facts, chosen = [view.facts for view in views], [*retired, *deleted]
    if dry_run:
        went = await survey(store, facts, chosen)
    else:
        went = await collect(store, facts, retired, deleted=deleted, failed=failed)
    gone = {(removal.tag, removal.attempt) for removal in went}
    unproved = [facts for facts, _ in chosen if (facts.tag, str(facts.attempt)) not in gone]
    left = {c.tag for c in catalog.checkpoints_of(v for v in views if (v.tag, str(v.attempt)) not in gone)}
    return CollectionReport(
        root=store.url,
        dry_run=dry_run,
        retired=tuple(tag for tag in dict.fromkeys(facts.tag for facts, _ in chosen) if tag not in left),
        unproved=tuple(facts.tag for facts in unproved),
        removed=tuple(went),
        freed_bytes=sum(removal.freed_bytes for removal in went),
        kept_bytes=sum(removal.kept_bytes for removal in went),
    )
